// Random weights in blocks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// W as stored in a file, and the same blocks unpacked for the oracle.
struct BlockMatrix {
  int64_t out = 0, in = 0;
  BlockFormat format = BlockFormat::kNone;
  std::vector<uint8_t> bytes;
  std::vector<UnpackedBlock> blocks;  // [out][in / weights of a block]

  WeightView View() const { return {bytes.data(), DType::kF32, out, in, format}; }
  int64_t RowBlocks() const { return in / BlockWeights(format); }
  void Unpack() {
    blocks.resize(static_cast<size_t>(out * RowBlocks()));
    for (size_t i = 0; i < blocks.size(); ++i) {
      Info(format).unpack(bytes.data() + i * static_cast<size_t>(BlockBytes(format)), blocks[i]);
    }
  }
};

// Bytes of the fp16 scale and offset in a block; -1: none.
struct ScaleBytes {
  int scale = 0, offset = -1;
};
inline ScaleBytes ScaleBytesOf(BlockFormat format) {
  switch (format) {
    case BlockFormat::kQ4_1:
    case BlockFormat::kQ5_1:
    case BlockFormat::kQ4_K:
    case BlockFormat::kQ5_K:
      return {0, 2};
    case BlockFormat::kQ2_K:
      return {80, 82};
    case BlockFormat::kQ3_K:
      return {108};
    case BlockFormat::kQ6_K:
      return {208};
    case BlockFormat::kMXFP4:
    case BlockFormat::kNVFP4:
      return {-1};
    default:
      return {0};
  }
}

inline void SetScales(BlockFormat format, float scale, float offset, uint8_t* block) {
  const auto put = [&](int at, float value) {
    const uint16_t bits = FloatToFp16(value);
    if (at >= 0) std::memcpy(block + at, &bits, sizeof bits);
  };
  put(ScaleBytesOf(format).scale, scale);
  put(ScaleBytesOf(format).offset, offset);
  if (format == BlockFormat::kMXFP4) block[0] = static_cast<uint8_t>(std::ilogb(scale) + 127);
  for (int sub = 0; format == BlockFormat::kNVFP4 && sub < 4; ++sub) {
    if ((block[sub] & 127) == 127) --block[sub];  // NaN
  }
}

// Random codes; scales differ from block to block.
inline BlockMatrix RandomBlocks(int64_t out, int64_t in, BlockFormat format, uint32_t seed) {
  BlockMatrix w{out, in, format, {}, {}};
  std::mt19937 generator(seed);
  w.bytes.resize(static_cast<size_t>(out * RowBytes(format, in)));
  for (uint8_t& byte : w.bytes) byte = static_cast<uint8_t>(generator());
  const auto size = static_cast<size_t>(BlockBytes(format));
  for (size_t at = 0; at < w.bytes.size(); at += size) {
    const float scale = 0.001F + 0.01F * static_cast<float>(generator() % 1000) / 1000;
    SetScales(format, scale, -0.1F + 0.1F * static_cast<float>(generator() % 1000) / 1000, w.bytes.data() + at);
  }
  w.Unpack();
  return w;
}

}  // namespace kvanta::kernels
