"""Prints tests/weights/block_golden.h: values of weight blocks as the gguf package dequantizes them.

python tests/oracle/make_block_golden.py | clang-format-14 > tests/weights/block_golden.h
"""

from __future__ import annotations

import gguf
import numpy as np

# As in kernels::BlockFormat.
FORMATS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
FORMATS += ["MXFP4", "NVFP4"]
# Byte of each fp16 scale and offset in a block.
FP16 = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)}
FP16 |= {"Q6_K": (208,), "MXFP4": (), "NVFP4": ()}
BLOCKS = 4


def blocks_of(name: str, random: np.random.Generator) -> np.ndarray:
    """Random bytes with finite scales, U8 [BLOCKS][bytes of a block]."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    blocks = random.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for at in FP16.get(name, (0,)):
        scales = random.uniform(-0.1, 0.1, BLOCKS).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(BLOCKS, 2)
    if name == "MXFP4":
        blocks[:, 0] = (0, 1, 120, 250)
    if name == "NVFP4":
        blocks[:, :4] = random.integers(0, 127, (BLOCKS, 4))
    return blocks


def fnv1a(values: np.ndarray) -> int:
    """FNV-1a of the f32 values' bits; +0 for zeros of any sign."""
    digest = 0xCBF29CE484222325
    for byte in (values.astype(np.float32) + np.float32(0)).tobytes():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def main() -> None:
    random = np.random.default_rng(22)
    print("// Made by tests/oracle/make_block_golden.py with the gguf package; do not edit.")
    print("#pragma once\n\n#include <cstdint>\n\nnamespace kvanta::weights::golden {\n")
    print("struct BlockGolden {\n  const char* format;\n  const char* hex;  // of a row of blocks")
    print("  uint64_t digest;  // FNV-1a of the values' f32 bits, zeros positive\n};\n")
    print("inline constexpr BlockGolden kBlocks[] = {")
    for name in FORMATS:
        blocks = blocks_of(name, random)
        values = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name])
        lines = [f'"{row.tobytes().hex()}"' for row in blocks]
        print(f'{{"{name}", {" ".join(lines)}, {fnv1a(values.ravel()):#x}ULL}},')
    print("};\n\n}  // namespace kvanta::weights::golden")


if __name__ == "__main__":
    main()
