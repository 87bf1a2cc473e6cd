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
  weights::BlockFormat format = weights::BlockFormat::kNone;
  std::vector<uint8_t> bytes;
  std::vector<weights::UnpackedBlock> blocks;  // [out][in / weights of a block]

  weights::WeightView View() const { return {bytes.data(), DType::kF32, out, in, format}; }
  int64_t RowBlocks() const { return in / weights::BlockWeights(format); }
  void Unpack() {
    blocks.resize(static_cast<size_t>(out * RowBlocks()));
    for (size_t i = 0; i < blocks.size(); ++i) {
      Info(format).unpack(bytes.data() + i * static_cast<size_t>(weights::BlockBytes(format)), blocks[i]);
    }
  }
};

// Bytes of the fp16 scale and offset in a block; -1: none.
struct ScaleBytes {
  int scale = 0, offset = -1;
};
inline ScaleBytes ScaleBytesOf(weights::BlockFormat format) {
  switch (format) {
    case weights::BlockFormat::kQ4_1:
    case weights::BlockFormat::kQ5_1:
    case weights::BlockFormat::kQ4_K:
    case weights::BlockFormat::kQ5_K:
      return {0, 2};
    case weights::BlockFormat::kQ2_K:
      return {80, 82};
    case weights::BlockFormat::kQ3_K:
      return {108};
    case weights::BlockFormat::kQ6_K:
      return {208};
    case weights::BlockFormat::kMXFP4:
    case weights::BlockFormat::kNVFP4:
      return {-1};
    default:
      return {0};
  }
}

inline void SetScales(weights::BlockFormat format, float scale, float offset, uint8_t* block) {
  const auto put = [&](int at, float value) {
    const uint16_t bits = FloatToFp16(value);
    if (at >= 0) std::memcpy(block + at, &bits, sizeof bits);
  };
  put(ScaleBytesOf(format).scale, scale);
  put(ScaleBytesOf(format).offset, offset);
  if (format == weights::BlockFormat::kMXFP4) block[0] = static_cast<uint8_t>(std::ilogb(scale) + 127);
  for (int sub = 0; format == weights::BlockFormat::kNVFP4 && sub < 4; ++sub) {
    if ((block[sub] & 127) == 127) --block[sub];  // NaN
  }
}

// Random codes; scales differ from block to block.
inline BlockMatrix RandomBlocks(int64_t out, int64_t in, weights::BlockFormat format, uint32_t seed) {
  BlockMatrix w{out, in, format, {}, {}};
  std::mt19937 generator(seed);
  w.bytes.resize(static_cast<size_t>(out * weights::RowBytes(format, in)));
  for (uint8_t& byte : w.bytes) byte = static_cast<uint8_t>(generator());
  const auto size = static_cast<size_t>(weights::BlockBytes(format));
  for (size_t at = 0; at < w.bytes.size(); at += size) {
    const float scale = 0.001F + 0.01F * static_cast<float>(generator() % 1000) / 1000;
    SetScales(format, scale, -0.1F + 0.1F * static_cast<float>(generator() % 1000) / 1000, w.bytes.data() + at);
  }
  w.Unpack();
  return w;
}

}  // namespace kvanta::kernels
