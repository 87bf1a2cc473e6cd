#!/usr/bin/env python3
"""Trains the levels of the trellis formats and writes src/formats/trellis_levels.h.

Lloyd's iteration on rows of 64 unit normal values, each divided by its root mean square and laid end to end: the best
windows by Viterbi's algorithm, then each level becomes the mean of the values that chose it. From several random
starts, the levels that err least on other rows are kept. A few minutes; needs numpy. Another numpy may round
differently, so the file is written once, and is the specification. With --bits, levels of other widths stay.

Usage: train_trellis.py [--bits 1 ...] [--seeds 8] [--rounds 40]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
HEADER = Path(__file__).resolve().parent.parent / "src" / "formats" / "trellis_levels.h"
STATES = 256
SIGMA = 42.0  # level of a value of 1: 127 is 3 standard deviations
ROW = 64
STREAMS, LENGTH = 128, 1024
# Root mean square, in levels, at which a row is searched: least error in one search, over steps of 1.
SEARCH_RMS = {1: 42, 2: 42, 3: 41, 4: 39}


def windows(values: F32, levels: F32, bits: int) -> NDArray[np.int64]:
    """The windows [streams, length] of least squared error, in order of processing, with free ends."""
    streams, length = values.shape
    choices = 1 << bits
    cost = np.zeros((streams, STATES), np.float32)
    decisions = np.empty((length, streams, STATES >> bits), np.uint8)
    for i in range(length):
        by_choice = cost.reshape(streams, choices, -1)
        decisions[i] = by_choice.argmin(axis=1)
        metric = np.take_along_axis(by_choice, decisions[i][:, None, :].astype(np.int64), axis=1)[:, 0]
        metric -= metric.min(axis=1, keepdims=True)
        cost = np.repeat(metric, choices, axis=1) + np.square(values[:, i, None] - levels)
    window = cost.argmin(axis=1)
    found = np.empty((streams, length), np.int64)
    every = np.arange(streams)
    for i in range(length - 1, -1, -1):
        found[:, i] = window
        u = window >> bits
        window = u | decisions[i][every, u].astype(np.int64) << (8 - bits)
    return found


def normal_rows(random: np.random.Generator) -> F32:
    rows = random.standard_normal((STREAMS * LENGTH // ROW, ROW)).astype(np.float32)
    rows /= np.sqrt(np.square(rows).mean(axis=1, keepdims=True))
    return rows.reshape(STREAMS, LENGTH)


def error(levels: F32, bits: int, random: np.random.Generator) -> float:
    values = normal_rows(random)
    return float(np.square(values - levels[windows(values, levels, bits)]).mean())


def train(bits: int, seed: int, rounds: int) -> F32:
    random = np.random.default_rng([bits, seed])
    quantiles = [NormalDist().inv_cdf((i + 0.5) / STATES) for i in range(STATES)]
    levels = random.permutation(np.array(quantiles, np.float32))
    for _ in range(rounds):
        values = normal_rows(random)
        chosen = windows(values, levels, bits).ravel()
        count = np.bincount(chosen, minlength=STATES)
        total = np.bincount(chosen, values.ravel(), STATES)
        levels = np.where(count > 0, total / np.maximum(count, 1), levels).astype(np.float32)
    steps = np.clip(np.rint(levels * SIGMA), -127, 127)
    return steps.astype(np.float32)


def best(bits: int, seeds: int, rounds: int) -> NDArray[np.int64]:
    errors = {}
    for seed in range(seeds):
        levels = train(bits, seed, rounds)
        errors[seed] = (error(levels / np.float32(SIGMA), bits, np.random.default_rng(99)), levels)
        print(f"{bits} bits, seed {seed}: error {errors[seed][0]:.5f}", flush=True)
    return min(errors.values(), key=lambda found: found[0])[1].astype(np.int64)


def header(tables: dict[int, NDArray[np.int64]]) -> str:
    lines = [
        "// Levels of the trellis formats (formats/trellis.h), written by tools/train_trellis.py.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace kvanta::formats {",
        "",
        "struct TrellisLevelTable {",
        "  float rms;  // root mean square, in levels, at which a row is searched",
        "  alignas(64) int8_t levels[256];",
        "};",
        "",
        f"inline constexpr int kMinTrellisBits = {min(tables)};",
        "// clang-format off",
        f"inline constexpr TrellisLevelTable kTrellisLevels[{len(tables)}] = {{",
    ]
    for bits, levels in sorted(tables.items()):
        lines.append(f"    {{{SEARCH_RMS[bits]},  // {bits} bits")
        for first in range(0, STATES, 16):
            row = ", ".join(str(level) for level in levels[first : first + 16])
            opening = "     {" if first == 0 else "      "
            closing = "}}," if first == STATES - 16 else ","
            lines.append(opening + row + closing)
    lines += ["};", "// clang-format on", "", "}  // namespace kvanta::formats", ""]
    return "\n".join(lines)


def written() -> dict[int, NDArray[np.int64]]:
    """Levels of the file by bits."""
    found = re.findall(r"// (\d) bits\s*\{([^}]*)\}", HEADER.read_text())
    return {int(bits): np.array([int(level) for level in text.split(",")]) for bits, text in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--bits", type=int, nargs="+", choices=sorted(SEARCH_RMS), default=sorted(SEARCH_RMS))
    options = parser.parse_args()
    HEADER.write_text(header(written() | {bits: best(bits, options.seeds, options.rounds) for bits in options.bits}))


if __name__ == "__main__":
    main()
