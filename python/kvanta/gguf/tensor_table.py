"""Tables of GGUF's modules and Hugging Face's.

A line of a table: GGUF's module in a block, the Hugging Face module in a layer, the shape, and words: `bias` (a bias
may be there), `optional`, `dense` and `moe` (needed in layers without and with experts), `attention` and `recurrent`
(needed in layers of attention and in those with a state), `mlp` (needed in layers of an MLP alone), `flat` (the file's
shape may be any of as many values), `k` and `v` (needed in layers that have keys, and values, of
their own), `layer_inputs` (needed with an input of every layer), `norm`. "*" stands for the number of an expert or a
head, the first size. "|" joins modules that divide the rows, equally but where `Module.rows` says how. A name after "="
is that of the tensor itself; one that ends with a dot has neither .weight nor .bias appended.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """A line of a table."""

    name: str
    shape: tuple[str, ...]
    words: frozenset[str]
    rows: tuple[str, ...] = ()
    """Rows of each of several modules; none: equal parts."""

    def tensors(self, kind: str) -> list[str]:
        """Hugging Face's names of the tensors: one, or several that divide the rows."""
        if self.name.startswith("="):
            return [self.name[1:]]
        parent, _, names = self.name.rpartition(".")
        return [f"{parent}.{name}.{kind}" if parent else f"{name}.{kind}" for name in names.split("|")]


def parse_table(text: str) -> dict[str, Module]:
    """Modules by GGUF's names; a later line replaces an earlier one."""
    modules = {}
    for line in text.strip().splitlines():
        if line.strip():
            name, module, shape, *words = line.split()
            modules[name] = Module(module, tuple(shape.split(",")), frozenset(words))
    return modules
