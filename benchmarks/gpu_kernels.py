"""Registers, spills and instructions of the main loops of the CUDA kernels, as nvcc compiles them; needs no GPU.

    python benchmarks/gpu_kernels.py --json docs/results/gpu-kernels.json

Compiles the units src/kernels/**/*_entries.cu as the build does, for --arch. Registers, spills and shared memory are
ptxas's (-v; dynamic shared memory is not known there), instructions those of the machine code: nvdisasm, which the
package nvidia-cuda-nvdisasm has; without it they are left out. The main loop is where a kernel spends its time: of all
with products of tensor cores and exponentials (attention) the shortest, which takes chunks of 32 tokens that every row
of a tile sees; else of innermost loops the one with the most products of tensor cores or, without such, with the most
floating-point operations. Of its instructions, "loop" are all and "path" those of the shortest way through it that has
all products of tensor cores, barriers and asynchronous copies: without softcaps, sinks and outputs that are rescaled.
Loops within it that count to a constant are on the path as often as they run (kernels for latents).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Options of cmake/KvantaCuda.cmake.
OPTIONS = ("-std=c++20", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-Iinclude", "-Isrc")
# Classes of instructions by the beginning of their names; everything else is "other": integers, logic, conversions.
CLASSES = {
    "hmma": ("HMMA",),
    "hgmma": ("HGMMA",),
    "ldgsts": ("LDGSTS",),
    "ldg": ("LDG",),
    "stg": ("STG",),
    "lds": ("LDS",),
    "sts": ("STS",),
    "local": ("LDL", "STL"),
    "shuffle": ("SHFL", "MOVM", "VOTE"),
    "mufu": ("MUFU",),
    "float": ("FFMA", "FADD", "FMUL", "FMNMX", "FSETP", "FSEL", "HFMA2", "HADD2", "HMUL2", "HMNMX2", "HSETP2"),
    "convert": ("F2F", "F2FP", "F2I", "I2F", "I2FP", "PRMT"),
    "barrier": ("BAR", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "WARPGROUP"),
    "branch": ("BRA", "BSSY", "BSYNC", "EXIT", "CALL", "RET", "NOP"),
}
_BY_LENGTH = sorted(((name, key) for key, names in CLASSES.items() for name in names), key=lambda pair: -len(pair[0]))

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\w+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_TEXT = re.compile(r"^\.text\.(\w+):$")
_LABEL = re.compile(r"^(\.L_x_\d+):$")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")
_BRANCH = re.compile(r"`\((\.L_x_\d+)\)")
# A counter that is compared to a constant, and its increment.
_LIMIT = re.compile(r"P\d+, PT, (R\d+), 0x([0-9a-f]+), PT")
_INCREMENT = re.compile(r"(R\d+), \1(?:\.reuse)?, 0x([0-9a-f]+)")


def read_ptxas(text: str) -> dict[str, dict[str, int]]:
    """Resources of each kernel by its mangled name: registers, bytes of spills and of static shared memory."""
    kernels: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    is_entry = True  # else a function that it calls
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            current = kernels[entry[1]] = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0}
        elif properties := _PROPERTIES.search(line):
            is_entry = properties[1] in kernels
        elif is_entry and (spills := _SPILLS.search(line)):
            current["spill_bytes"] = int(spills[2]) + int(spills[3])
        elif registers := _REGISTERS.search(line):
            current["registers"] = int(registers[1])
            if shared := _SHARED.search(line):
                current["shared_bytes"] = int(shared[1])
    return kernels


@dataclass
class MachineCode:
    """Machine code of a kernel: names of instructions, labels, and branches (label, whether it always jumps)."""

    names: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branches: dict[int, tuple[str, bool]] = field(default_factory=dict)
    limits: dict[int, tuple[str, int]] = field(default_factory=dict)
    increments: dict[int, tuple[str, int]] = field(default_factory=dict)

    @property
    def loops(self) -> list[tuple[int, int]]:
        """Branches back as (first, last) instruction of a loop; a branch to itself ends a kernel."""
        jumps = ((self.labels.get(label, at), at) for at, (label, _) in self.branches.items())
        return [(first, last) for first, last in jumps if first < last]

    def trips(self, loop: tuple[int, int]) -> int:
        """Iterations of a loop that counts from 0 to a constant; 1: unknown."""
        first, last = loop
        limit = next((self.limits[at] for at in range(last, first - 1, -1) if at in self.limits), None)
        steps = [
            step
            for at, (register, step) in self.increments.items()
            if first <= at <= last and limit and register == limit[0]
        ]
        return limit[1] // steps[0] if limit and len(steps) == 1 and limit[1] % steps[0] == 0 else 1

    def path(self, loop: tuple[int, int]) -> Counter[str]:
        """Instructions of the shortest way through a loop with all of its products, barriers and copies, by class."""
        first, last = loop
        needed = ("HMMA", "HGMMA", "BAR", "LDGSTS")
        best: dict[int, tuple[int, int]] = {last: (0, -1)}  # from an instruction on: needed ones, minus instructions
        following = {}
        for at in range(last - 1, first - 1, -1):
            label, always = self.branches.get(at, ("", False))
            targets = [] if always else [at + 1]
            if label and at < self.labels.get(label, at) <= last:
                targets.append(self.labels[label])
            if targets := [target for target in targets if target in best]:
                following[at] = max(targets, key=best.__getitem__)
                have, length = best[following[at]]
                best[at] = have + self.names[at].startswith(needed), length - 1
        inner = [of for of in self.loops if first <= of[0] and of[1] <= last and of != loop and self.trips(of) > 1]
        at, times = first, Counter[str]()
        while at in best:
            times[class_of(self.names[at])] += math.prod(self.trips(of) for of in inner if of[0] <= at <= of[1])
            at = following.get(at, -1)
        return times


def read_sass(text: str) -> dict[str, MachineCode]:
    """Machine code of each kernel in nvdisasm's listing, by its mangled name."""
    kernels: dict[str, MachineCode] = {}
    code = MachineCode()
    for line in text.splitlines():
        if section := _TEXT.match(line):
            code = kernels[section[1]] = MachineCode()
        elif label := _LABEL.match(line):
            code.labels[label[1]] = len(code.names)
        elif instruction := _INSTRUCTION.search(line):
            predicate, name, operands = instruction.groups()
            target = _BRANCH.search(operands)
            if target and name.startswith("BRA"):
                always = predicate is None and operands.strip().startswith("`")
                code.branches[len(code.names)] = target[1], always
            if name.startswith("ISETP") and (limit := _LIMIT.search(operands)):
                code.limits[len(code.names)] = limit[1], int(limit[2], 16)
            elif name in ("VIADD", "IADD3") and (increment := _INCREMENT.search(operands)):
                code.increments[len(code.names)] = increment[1], int(increment[2], 16)
            code.names.append(name)
    return kernels


def class_of(name: str) -> str:
    """Class of an instruction: HMMA.16816.F32 -> hmma."""
    base = name.partition(".")[0]
    return next((key for prefix, key in _BY_LENGTH if base == prefix), "other")


def count(names: Iterable[str]) -> Counter[str]:
    return Counter(map(class_of, names))


def _nested(loops: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Loops without jumps back into one from code that the compiler moved out of it."""
    return [(a, b) for a, b in loops if not any(first < a <= last < b for first, last in loops)]


def _innermost(loops: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for first, last in loops:
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops):
            yield first, last


def main_loop(code: MachineCode) -> tuple[int, int] | None:
    """The main loop (module's docstring); None without a loop."""

    def classes(loop: tuple[int, int]) -> Counter[str]:
        return count(code.names[loop[0] : loop[1] + 1])

    def has_exponential(loop: tuple[int, int]) -> bool:
        return any(name.startswith("MUFU.EX2") for name in code.names[loop[0] : loop[1] + 1])

    nested = _nested(code.loops)

    def products(of: Counter[str]) -> int:
        return of["hmma"] + of["hgmma"]

    chunks = [loop for loop in nested if products(classes(loop)) and has_exponential(loop)]
    if chunks:
        return min(chunks, key=lambda loop: loop[1] - loop[0])

    def weight(loop: tuple[int, int]) -> tuple[int, int, int]:
        of = classes(loop)
        return products(of), of["float"], of.total()

    return max(_innermost(nested), key=weight, default=None)


def short_name(name: str) -> str:
    """A demangled name without namespaces, result and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|kvanta::(?:\w+::)*", "", name)
    name = re.sub(r"\((?:int|bool|unsigned int)\)", "", name).removeprefix("void ")
    return name.rpartition("(")[0].strip() or name


def _demangle(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def find_nvdisasm() -> str | None:
    """The nvdisasm on the PATH, or in the package nvidia-cuda-nvdisasm."""
    if found := shutil.which("nvdisasm"):
        return found
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            path.chmod(path.stat().st_mode | 0o100)
            return str(path)
    return None


def compile_unit(unit: Path, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Rows of a unit's kernels."""
    cubin = folder / f"{unit.stem}.cubin"
    arch = options.arch
    if arch == "sm_90" and "warpgroup_nvcc.h" in unit.read_text(encoding="utf-8"):
        arch += "a"  # as in the build
    command = [options.nvcc, *OPTIONS, f"-arch={arch}", "-Xptxas", "-v", "-cubin", str(unit), "-o", str(cubin)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)}: {done.stderr[-2000:]}")
    resources = read_ptxas(done.stdout + done.stderr)
    code: dict[str, MachineCode] = {}
    if options.nvdisasm:
        listing = subprocess.run([options.nvdisasm, "-c", str(cubin)], capture_output=True, text=True, check=True)
        code = read_sass(listing.stdout)
    rows = []
    for mangled, name in zip(resources, _demangle(list(resources)), strict=False):
        row: dict[str, Any] = {"unit": unit.stem, "kernel": short_name(name), **resources[mangled]}
        if mangled in code:
            row["instructions"] = len(code[mangled].names)
            loop = main_loop(code[mangled])
            row["loop"] = row["path"] = None
            if loop is not None:
                for key, of in (
                    ("loop", count(code[mangled].names[loop[0] : loop[1] + 1])),
                    ("path", code[mangled].path(loop)),
                ):
                    row[key] = {"instructions": of.total(), **of}
        rows.append(row)
    return sorted(rows, key=lambda row: str(row["kernel"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90", help="compute capability to compile for (sm_90)")
    parser.add_argument("--units", nargs="*", metavar="NAME", help="names of units (all)")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--nvdisasm", default=find_nvdisasm(), help="nvdisasm, if it is not found by itself")
    parser.add_argument("--json", type=Path, help="file for the result")
    options = parser.parse_args()
    units = sorted((ROOT / "src/kernels").rglob("*_entries.cu"))
    if unknown := set(options.units or ()) - {unit.stem for unit in units}:
        raise SystemExit(f"error: no unit {min(unknown)}; there are: {', '.join(unit.stem for unit in units)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for unit in units:
            if not options.units or unit.stem in options.units:
                rows += compile_unit(unit, options, Path(folder))
    version = subprocess.run([options.nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", version)
    for row in rows:
        loop = row.get("loop") or {}
        print(f"{row['kernel'][:90]:90} {row['registers']:4} {row['spill_bytes']:6} {loop.get('instructions', '-'):>6}")
    if options.json:
        settings = json.dumps({"nvcc": release[1] if release else "", "arch": options.arch})
        lines = ",\n".join(map(json.dumps, rows))  # a line for each kernel
        options.json.write_text(f'{settings[:-1]}, "kernels": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
