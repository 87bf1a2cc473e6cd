"""Keys with uneven bits (klt3, klt2; by token groups klt3_g64, klt2_g64) in numpy, written from docs/formats.md and not
from the C++."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import trellis
from kv_cells import F32, U8
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
BLOCK = 8
ERRORS = (1, 0.363, 0.119, 0.0384, 0.0125, 0.0043, 0.00135, 0.0005)
RMS = (1, 38, 36, 33, 28, 20, 17, 15)


def _levels(bits: int) -> tuple[int, I64]:
    """Root mean square and the 256 levels by window."""
    if bits == 0:
        return RMS[0], np.zeros(256, np.int64)
    if bits <= 4:
        return RMS[bits], trellis.tables()[bits][1]
    last = (1 << bits) - 1
    positive: list[int] = []
    for odd in range(1, last + 1, 2):
        rounded = math.floor(Fraction(127 * odd, 4 * last - 3 * odd) + Fraction(1, 2))
        positive.append(max(rounded, positive[-1] + 1 if positive else 1))
    levels = [-level for level in reversed(positive)] + positive
    return RMS[bits], np.tile(np.array(levels, np.int64), 256 >> bits)


@dataclass(frozen=True)
class Allocation:
    bits: I64
    """[head_dim]"""
    weight: F32
    gain: I64

    @property
    def string(self) -> slice:
        """Channels of the circular string."""
        return slice(int((self.bits > 4).sum()), int((self.bits > 0).sum()))


def _block_variances(deviations: F32) -> F64:
    variances = np.zeros(len(deviations) // BLOCK)
    for channel, deviation in enumerate(deviations.astype(np.float64)):
        variances[channel // BLOCK] += deviation * deviation
    return variances


def spend(deviations: F32, mean_bits: int) -> I64:
    """Bits of each block."""
    variances = _block_variances(deviations)
    bits = np.zeros(len(variances), np.int64)
    for _ in range(mean_bits * len(bits)):
        gains = [v * (ERRORS[b] - ERRORS[b + 1]) if b < 7 else -1.0 for v, b in zip(variances, bits, strict=True)]
        bits[int(np.argmax(gains))] += 1
    return bits


def allocate(deviations: F32, mean_bits: int) -> Allocation:
    return weigh(deviations, spend(deviations, mean_bits))


def weigh(deviations: F32, bits: I64) -> Allocation:
    """Weights and gains of channels whose blocks have these bits, which never rise."""
    error, searched = 0.0, 0
    for variance, b in zip(_block_variances(deviations), bits, strict=True):
        if 0 < b <= 4:
            error, searched = error + variance * ERRORS[b], searched + BLOCK
    unit = np.sqrt(128.0 * searched / error) if error > 0 else 1.0
    of_channel = np.repeat(bits, BLOCK)
    scaled = deviations.astype(np.float64) / np.array([_levels(int(b))[0] for b in of_channel])
    first = float(deviations[0])
    relative = scaled * (1 / np.sqrt(first * first))
    gain = np.clip(np.floor(scaled * unit * 4096 + 0.5), 1, 32767).astype(np.int64)
    return Allocation(of_channel, (relative * relative).astype(np.float32), gain)


def default_allocation(head_dim: int, mean_bits: int) -> Allocation:
    return allocate(default_deviations(head_dim), mean_bits)


def mean_error(head_dim: int, mean_bits: int) -> float:
    """Relative squared error of equal normal channels that the bits without a calibration are for."""
    bits = default_allocation(head_dim, mean_bits).bits
    return float(np.mean(np.array(ERRORS)[bits]))


def _saturate(x: I64) -> I64:
    return np.clip(x, -32768, 32767)


def _run(targets: I64, allocation: Allocation, channels: range, metrics: I64, decisions: dict[int, I64]) -> I64:
    """Processes channels from the last to the first; decisions [rows, u] by channel."""
    for channel in reversed(channels):
        b = int(allocation.bits[channel])
        by_choice = metrics.reshape(len(metrics), 1 << b, -1)
        decisions[channel] = by_choice.argmin(axis=1)
        best = np.repeat(by_choice.min(axis=1), 1 << b, axis=1)
        difference = targets[:, channel, None] - 64 * _levels(b)[1]
        error = _saturate(8 * ((difference * allocation.gain[channel] + (1 << 14)) >> 15))
        metrics = _saturate(best + ((error * error) >> 16))
        if channel % BLOCK == 0:
            metrics = _saturate(metrics - metrics.min(axis=1, keepdims=True))
    return metrics


def _next(window: I64, allocation: Allocation, channel: int, decisions: dict[int, I64]) -> I64:
    b = int(allocation.bits[channel])
    u = window >> b
    return np.asarray(u | decisions[channel][np.arange(len(u)), u] << (8 - b))


def _search(targets: I64, allocation: Allocation) -> I64:
    rows = len(targets)
    begin, end = allocation.string.start, allocation.string.stop
    codes = np.zeros(targets.shape, np.int64)
    if begin == end:
        return codes
    head, tail = begin, end
    while head < end and allocation.bits[begin:head].sum() < trellis.JOIN_BITS:
        head += BLOCK
    while tail > begin and allocation.bits[tail:end].sum() < trellis.JOIN_BITS:
        tail -= BLOCK
    decisions: dict[int, I64] = {}
    metrics = _run(targets, allocation, range(begin, head), np.zeros((rows, 256), np.int64), decisions)
    metrics = _run(targets, allocation, range(tail, end), metrics, decisions)
    window = metrics.argmin(axis=1)
    for channel in range(tail, end):
        window = _next(window, allocation, channel, decisions)
    start = np.full((rows, 256), trellis.WRONG_START, np.int64)
    start[np.arange(rows), window] = 0
    _run(targets, allocation, range(begin, end), start, decisions)
    for channel in range(begin, end):
        codes[:, channel] = window & ((1 << int(allocation.bits[channel])) - 1)
        window = _next(window, allocation, channel, decisions)
    return codes


def _pack(codes: I64, allocation: Allocation) -> U8:
    bits = [(codes[:, c, None] >> np.arange(b)) & 1 for c, b in enumerate(allocation.bits)]
    return np.packbits(np.concatenate(bits, axis=1).astype(np.uint8), axis=1, bitorder="little")


def levels_of(packed: U8, allocation: Allocation) -> I64:
    """Levels [rows, head_dim] of rows of packed codes."""
    string = np.unpackbits(packed, axis=1, bitorder="little").astype(np.int64)
    place = np.concatenate([[0], np.cumsum(allocation.bits)])
    begin = place[allocation.string.start]
    levels = np.zeros((len(packed), len(allocation.bits)), np.int64)
    for channel, b in enumerate(allocation.bits):
        places = place[channel] + np.arange(8)
        if b > 4:
            places = places[:b]
        elif b > 0:
            places = begin + (places - begin) % (string.shape[1] - begin)
        else:
            continue
        levels[:, channel] = _levels(int(b))[1][(string[:, places] << np.arange(len(places))).sum(axis=1)]
    return levels


def encode(values: F32, allocation: Allocation) -> tuple[U8, F32]:
    """Packed codes and scales, not rounded, of clamped rows; both zero where a row is too small for any scale."""
    wide = values.astype(np.float64)
    coded = allocation.string.stop
    rms = np.array([_levels(int(b))[0] for b in allocation.bits[:coded]])
    step = np.sqrt(trellis.sum_of(np.square(wide[:, :coded] / rms)) / coded)
    factor = (64 / np.where(step < 2.0**-30, np.inf, step)).astype(np.float32)
    targets = np.rint(np.clip(values * factor[:, None], np.float32(-16320), np.float32(16320))).astype(np.int64)
    codes = _search(targets, allocation)
    for channel in range(allocation.string.start):
        b = int(allocation.bits[channel])
        distance = np.abs(targets[:, channel, None] - 64 * _levels(b)[1][: 1 << b])
        codes[:, channel] = distance.argmin(axis=1)
    packed = _pack(codes, allocation)
    levels = levels_of(packed, allocation)
    weighted = allocation.weight.astype(np.float64) * levels
    energy = trellis.sum_of(weighted * levels)
    product = trellis.sum_of(weighted * wide)
    scale = np.where(energy > 0, product / np.where(energy > 0, energy, 1), 0).astype(np.float32)
    small = step < 2.0**-30
    packed[small] = 0
    return packed, np.where(small, np.float32(0), scale)


# ---- token groups: scales and bits of the channels of 64 tokens

GROUP = 64
STEPS = np.array([2.0 ** (n // 4) / 4 for n in range(16)]) * np.array(
    [1, 1.189207115002721, 1.4142135623730951, 1.681792830507429] * 4
)
"""Deviations by their code."""


def section_bytes(head_dim: int) -> int:
    return -(-(head_dim // 2 + head_dim // 16) // 16) * 16


def _pack_nibbles(values: I64) -> U8:
    return (values[0::2] | values[1::2] << 4).astype(np.uint8)


def _unpack_nibbles(data: U8) -> I64:
    return np.stack([data & 15, data >> 4], axis=1).astype(np.int64).reshape(-1)


@dataclass(frozen=True)
class Group:
    """Scales and bits of a group's channels, in the order of the codes."""

    bits: I64
    """[blocks]"""
    channels: I64
    """[head_dim]"""
    scales: F32
    """[head_dim], of a level of 1"""


def read_group(section: U8, head_dim: int, mean_bits: int) -> Group:
    steps = _unpack_nibbles(section[: head_dim // 2])
    bits = _unpack_nibbles(section[head_dim // 2 : head_dim // 2 + head_dim // 16])
    if bits.max() > 7 or bits.sum() != mean_bits * len(bits):
        bits = np.zeros_like(bits)
    blocks = np.argsort(-bits, kind="stable")
    channels = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    inverse = np.repeat([1 / RMS[b] for b in bits[blocks]], BLOCK)
    return Group(bits[blocks], channels, (STEPS[steps[channels]] * inverse).astype(np.float32))


def group_of(values: F32, calibrated: F32, mean_bits: int) -> tuple[U8, Allocation, Group]:
    """Section, and what rows in its order are encoded with, of the clamped values [64, head_dim] of a group."""
    head_dim = values.shape[1]
    square = np.zeros(head_dim)
    for row in values.astype(np.float64):
        square = square + row * row
    edges = np.append((STEPS * STEPS * 1.189207115002721)[:-1], np.inf)
    steps = (square[:, None] / GROUP >= edges).sum(axis=1)
    deviations = (calibrated.astype(np.float64) * STEPS[steps]).astype(np.float32)
    section = np.zeros(section_bytes(head_dim), np.uint8)
    nibbles = np.concatenate([_pack_nibbles(steps), _pack_nibbles(spend(deviations, mean_bits))])
    section[: len(nibbles)] = nibbles
    group = read_group(section, head_dim, mean_bits)
    return section, weigh(deviations[group.channels], group.bits), group


def default_deviations(head_dim: int) -> F32:
    return (1 / (1 + 15 * np.arange(head_dim) / head_dim)).astype(np.float32)


def decode_group(packed: U8, token_scales: F32, section: U8, head_dim: int, mean_bits: int) -> F32:
    group = read_group(section, head_dim, mean_bits)
    allocation = Allocation(np.repeat(group.bits, BLOCK), np.empty(0, np.float32), np.empty(0, np.int64))
    levels = levels_of(packed, allocation).astype(np.float32)
    x = np.zeros((len(packed), head_dim), np.float32)
    x[:, group.channels] = levels * token_scales[:, None] * group.scales
    return x
