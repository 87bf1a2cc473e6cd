"""Accuracy of trellis formats with scales or transforms that no kernel has yet: a forward pass by PyTorch that reads
the keys and values which a format's bytes stand for.

    kvanta calibrate smollm2 --query --text my.txt --tokens 12288 --out query.safetensors
    python benchmarks/simulate_scales.py smollm2 query.safetensors --calibration my.txt --text wiki.test.raw \
        --json docs/results/simulated-scales.json

Keys and values of closed pages but the first one are replaced, as by formats with sink=1; queries are not quantized.
Figures are the mean KL(exact cache || other) in nats per token over the second halves of windows. The variants:

    klt, t             today's formats: one scale for each token and head
    page               klt with the deviations of each page's channels in its header, in quarters of an octave: bits
                       follow the page
    page, equal bits   the same deviations, bits as of all pages
    blocks             deviations of a page by blocks of 8 channels
    both axes          values whose channels and tokens are scaled in turns (KVarN, OScaR) under the Hadamard transform
    output             values in the metric of the output projection, about their mean, under the trellis: errors that
                       the projection makes small may be larger
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvanta
from kvanta import formats
from kvanta.checkpoint.resolve import resolve_model
from kvanta.text.tokenizer import Tokenizer

PAGE = 64
Array = NDArray[np.float32]
Codec = Callable[[int, int, Array], Array]
"""(layer, KV head, [tokens, head_dim]) to what the bytes stand for."""


def pages(x: Array) -> Iterator[tuple[slice, Array]]:
    """Closed pages."""
    for begin in range(0, len(x) - PAGE + 1, PAGE):
        yield slice(begin, begin + PAGE), x[begin : begin + PAGE]


def through(scheme: str, side: str, x: Array, **arrays: Any) -> Array:
    data = formats.encode(scheme, side, x, through_exact_page=True, **arrays)
    return formats.decode(scheme, side, data, cast(tuple[int, int], x.shape), **arrays)


def steps_of_octaves(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Quarters of an octave."""
    rounded: NDArray[np.float64] = 2.0 ** (np.round(np.log2(np.maximum(x, 2.0**-12)) * 4) / 4)
    return rounded


def page_eigen(eigen: Array, y: Array, kind: str) -> Array:
    """Eigen-channels by the deviations of a page, `y`: its keys in channels of variance 1."""
    deviations = np.sqrt(np.mean(y.astype(np.float64) ** 2, axis=0))
    if kind == "blocks":
        deviations = np.repeat(np.sqrt(np.mean(deviations.reshape(-1, 8) ** 2, axis=1)), 8)
    deviations = steps_of_octaves(deviations)
    own = eigen.copy()
    own[:-1] /= deviations[:, None].astype(np.float32)
    if kind == "equal bits":
        return own
    own[-1] *= deviations.astype(np.float32)
    order = np.argsort(-own[-1], kind="stable")
    own[:-1], own[-1] = own[:-1][order], own[-1][order]
    return own


class Codecs:
    """Codecs of a model's keys and values by name."""

    def __init__(self, model: Any, scales: Path, moments: list[list[tuple[Array, NDArray[np.float64]]]]) -> None:
        with safe_open(scales, framework="np") as file:
            own = json.loads(file.metadata()["kvanta_kv_scales"])["layers"]
            self.eigen = [file.get_tensor(f"layers.{layer}.k_eigen") for layer in range(len(own))]
        self.means = [np.array(own[str(layer)]["k_mean"], np.float32) for layer in range(len(own))]
        self.moments = moments
        self.output = [layer.self_attn.o_proj.weight.detach().double().numpy() for layer in model.model.layers]

    def keys(self, scheme: str, kind: str = "") -> Codec:
        def codec(layer: int, head: int, x: Array) -> Array:
            mean, eigen, out = self.means[layer][head], self.eigen[layer][head], x.copy()
            for place, page in pages(x):
                own = page_eigen(eigen, (page - mean) @ eigen[:-1].T, kind) if kind else eigen
                out[place] = through(scheme, "k", page, mean=mean, eigen=own)
            return out

        return codec

    def values(self, scheme: str) -> Codec:
        def codec(_layer: int, _head: int, x: Array) -> Array:
            out = x.copy()
            for place, page in pages(x):
                out[place] = through(scheme, "v", page)
            return out

        return codec

    def both_axes(self, scheme: str) -> Codec:
        def codec(_layer: int, _head: int, x: Array) -> Array:
            out = x.copy()
            for place, page in pages(x):
                rest, channels = page.astype(np.float64), np.ones(page.shape[1])
                for _ in range(4):
                    tokens = np.sqrt(np.mean(rest**2, axis=1, keepdims=True)) + 1e-9
                    step = steps_of_octaves(np.sqrt(np.mean((rest / tokens) ** 2, axis=0)))
                    channels, rest = channels * step, rest / step
                out[place] = through(scheme, "v", rest.astype(np.float32)) * channels
            return out

        return codec

    def by_output(self, scheme: str) -> Codec:
        plain = self.values(scheme)
        found = [
            [self._output_transform(layer, head) for head in range(len(row))] for layer, row in enumerate(self.moments)
        ]

        def codec(layer: int, head: int, x: Array) -> Array:
            mean, matrix, inverse = found[layer][head]
            transformed = ((x - mean) @ matrix.T).astype(np.float32)
            out: Array = plain(layer, head, transformed) @ inverse.T + mean
            return out

        return codec

    def _output_transform(self, layer: int, head: int) -> tuple[Array, Array, Array]:
        """Mean, A and its inverse: A'A is the geometric mean of the metric of W_O and of the inverse covariance."""
        mean, covariance = self.moments[layer][head]
        size = len(mean)
        group = self.output[layer].shape[1] // size // len(self.moments[layer])
        columns = [self.output[layer][:, h * size : (h + 1) * size] for h in range(head * group, (head + 1) * group)]
        metric = _regular(sum(w.T @ w for w in columns))
        root, inverse_root = _power(_regular(covariance), 0.5), _power(_regular(covariance), -0.5)
        mixed = inverse_root @ _power(root @ metric @ root, 0.5) @ inverse_root
        matrix = _power(mixed, 0.5)
        matrix *= np.sqrt(size / np.trace(matrix.T @ matrix))
        return mean, matrix.astype(np.float32), np.linalg.inv(matrix).astype(np.float32)


def _regular(moment: Any) -> NDArray[np.float64]:
    result: NDArray[np.float64] = moment + 1e-3 * np.trace(moment) / len(moment) * np.eye(len(moment))
    return result


def _power(matrix: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    values, vectors = np.linalg.eigh(matrix)
    result: NDArray[np.float64] = vectors * values**exponent @ vectors.T
    return result


class Simulation:
    """A model whose attention reads replaced keys and values."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.replace: Callable[[int, Array, Array], tuple[Array, Array]] | None = None
        self.exact: dict[int, torch.Tensor] = {}
        ALL_ATTENTION_FUNCTIONS.register("simulated", self.attention)
        model.set_attn_implementation("simulated")

    def attention(self, module: Any, q: Any, k: Any, v: Any, _mask: Any, scaling: float, **_: Any) -> tuple[Any, None]:
        tokens = torch.arange(q.shape[2])
        causal = tokens[:, None] >= tokens
        exact = causal & ((tokens[:, None] // PAGE == tokens // PAGE) | (tokens < PAGE))
        coded_k, coded_v = k[0], v[0]
        if self.replace is not None:
            coded_k, coded_v = map(torch.from_numpy, self.replace(module.layer_idx, k[0].numpy(), v[0].numpy()))
        out = torch.empty(1, q.shape[2], q.shape[1], q.shape[3])
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // k.shape[1])
            logits = torch.where(exact, q[0, head] @ k[0, kv].T, q[0, head] @ coded_k[kv].T) * scaling
            p = torch.softmax(logits.masked_fill(~causal, -torch.inf), -1)
            out[0, :, head] = (p * exact) @ v[0, kv] + (p * ~exact) @ coded_v[kv]
        return out, None

    def log_probabilities(self, tokens: list[int]) -> torch.Tensor:
        """Log-probabilities of the second half."""
        with torch.no_grad():
            hidden = self.model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0, len(tokens) // 2 :]
            return torch.log_softmax(self.model.lm_head(hidden), -1)

    def divergences(self, windows: list[list[int]], keys: Codec | None, values: Codec | None) -> Array:
        def replace(layer: int, k: Array, v: Array) -> tuple[Array, Array]:
            sides = ((keys, k), (values, v))
            k, v = (
                x if codec is None else np.stack([codec(layer, h, x[h]) for h in range(len(x))]) for codec, x in sides
            )
            return k, v

        found = []
        for index, window in enumerate(windows):
            if index not in self.exact:
                self.replace = None
                self.exact[index] = self.log_probabilities(window)
            self.replace = replace
            exact = self.exact[index]
            found.append((exact.exp() * (exact - self.log_probabilities(window))).sum(-1).numpy())
        return np.concatenate(found)

    def value_moments(self, windows: list[list[int]]) -> list[list[tuple[Array, NDArray[np.float64]]]]:
        """Mean and covariance of values, [layer][KV head], without the first page's."""
        seen: dict[int, list[Array]] = {}

        def keep(layer: int, k: Array, v: Array) -> tuple[Array, Array]:
            seen.setdefault(layer, []).append(v[:, PAGE:].copy())
            return k, v

        self.replace = keep
        for window in windows:
            self.log_probabilities(window)
        moments = []
        for _, parts in sorted(seen.items()):
            v = np.concatenate(parts, axis=1).astype(np.float64)
            moments.append([(x.mean(0).astype(np.float32), np.cov(x.T, bias=True)) for x in v])
        return moments


def variants(codecs: Codecs) -> dict[str, tuple[Codec | None, Codec | None]]:
    found: dict[str, tuple[Codec | None, Codec | None]] = {}
    for bits in "23":
        klt, t = f"klt{bits}", f"t{bits}"
        found |= {
            f"k={klt}, v={t}": (codecs.keys(klt), codecs.values(t)),
            f"k={klt} by page, v={t} by output": (codecs.keys(klt, "page"), codecs.by_output(t)),
            f"k={klt}": (codecs.keys(klt), None),
            f"k={klt} by page": (codecs.keys(klt, "page"), None),
            f"k={klt} by page, equal bits": (codecs.keys(klt, "equal bits"), None),
            f"k={klt} by blocks": (codecs.keys(klt, "blocks"), None),
            f"v={t}": (None, codecs.values(t)),
            f"v={t} on both axes": (None, codecs.both_axes(t)),
            f"v={t} by output": (None, codecs.by_output(t)),
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="of the Llama architecture")
    parser.add_argument("scales", type=Path, help="of kvanta calibrate --query")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="text for moments of values")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--context", type=int, default=2048, metavar="N")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(os.cpu_count() or 1)
    folder = resolve_model(options.model).path
    tokenizer = Tokenizer(folder)

    def windows(file: Path, count: int) -> list[list[int]]:
        ids = list(tokenizer.encode(file.read_text(encoding="utf-8")[: 8 * count * options.context]))
        if len(ids) < count * options.context:
            parser.error(f"{file} has {len(ids):,} tokens; {count} windows of {options.context:,} are needed")
        return [ids[begin : begin + options.context] for begin in range(0, count * options.context, options.context)]

    simulation = Simulation(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    codecs = Codecs(simulation.model, options.scales, simulation.value_moments(windows(options.calibration, 3)))
    report: dict[str, Any] = {
        "model": options.model,
        "text": options.text.name,
        "windows": options.windows,
        "context": options.context,
        "version": kvanta.__version__,
        "rows": [],
    }
    for name, (keys, values) in variants(codecs).items():
        if options.variants and name not in options.variants:
            continue
        kl = simulation.divergences(windows(options.text, options.windows), keys, values)
        row = {
            "variant": name,
            "kl_mean": float(kl.mean()),
            "kl_median": float(np.median(kl)),
            "standard_error": float(kl.std() / len(kl) ** 0.5),
        }
        report["rows"].append(row)
        print(row, flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
