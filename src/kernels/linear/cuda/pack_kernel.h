// Rows of x as the B operands of a linear layer's products. For weights of bf16, x is rounded to bf16 as on the CPU.
// For the others to f16, after a power of two for each row that brings its largest value between 2^14 and 2^15: 11 bits
// for every value down to 2^-28 of the largest. A unit that includes this has included the primitives.
#pragma once

#include "kernels/cuda/model_work.h"

namespace kvanta::kernels::cuda {

inline constexpr int kPackWarps = 8;

inline LaunchShape ShapeOf(const PackWork& work) {
  return {work.rows, kPackWarps * kWarp, 4 * kPackWarps};
}

// The largest magnitude's bits: they are ordered as the numbers are, with infinities and NaN above.
KVANTA_DEVICE uint32_t LargestBits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = ThreadIndex(); i < count; i += kPackWarps * kWarp) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  const auto limit = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  for (int mask = kWarp / 2; mask > 0; mask /= 2) largest = limit(largest, ShuffleXor(largest, mask));
  if (ThreadIndex() % kWarp == 0) StoreShared(ThreadIndex() / kWarp * 4, largest);
  SyncBlock();
  for (int warp = 0; warp < kPackWarps; ++warp) largest = limit(largest, LoadShared<uint32_t>(4 * warp));
  return largest;
}

KVANTA_DEVICE float PowerOf2(int biased_exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(biased_exponent) << 23U);
}

// A block for each row.
KVANTA_DEVICE void RunBlock(const PackWork& work) {
  const int64_t row = BlockIndex();
  const float* x = work.x + row * work.x_stride;
  if (work.members.rows != 0) {
    const int64_t in_member = row % work.members.rows;
    if (in_member >= work.members.used) return;  // nobody wants the results either
    x = work.x + row / work.members.rows * work.x_member + in_member * work.x_stride;
  }
  const bool bf16 = work.kind == PanelKind::kBf16;
  float times = 1;
  float factor = 1;
  if (!bf16) {
    const auto exponent = static_cast<int>(LargestBits(x, work.in) >> 23U);
    if (exponent < 255) {  // else x is not finite, and shows in the result
      const int within = exponent < 15 ? 15 : exponent;
      times = PowerOf2(268 - within);
      factor = PowerOf2(within - 14);
    }
  }
  if (ThreadIndex() == 0) work.out.factors[row] = factor;

  const int64_t units = (work.in + kPanelChannels - 1) / kPanelChannels;
  const int64_t tile = row / kRowTile;
  const auto in_tile = static_cast<int>(row % kRowTile);
  // Four threads for a unit, as the lanes that take it: channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16.
  const int t = ThreadIndex() % 4;
  for (int64_t first = 0; first < units; first += kPackWarps * kWarp / 4) {
    const int64_t unit = first + ThreadIndex() / 4;
    Vec4 codes = {};
    float sum = 0;
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t k = unit * kPanelChannels + i * 8 + 2 * t;
      const float even = unit < units && k < work.in ? x[k] * times : 0.0F;
      const float odd = unit < units && k + 1 < work.in ? x[k + 1] * times : 0.0F;
      const uint32_t pair = bf16 ? PackBf16(even, odd) : PackF16(even, odd);
      codes.word[i] = pair;
      sum += F16ToFloat(static_cast<uint16_t>(pair)) + F16ToFloat(static_cast<uint16_t>(pair >> 16U));
    }
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);
    if (unit >= units) continue;
    uint8_t* to = work.out.codes + (((tile * units + unit) * kWarp) + in_tile * 4 + t) * 16;
    *reinterpret_cast<Vec4*>(to) = codes;
    if (!bf16 && t == 0) work.out.unit_sums[(tile * units + unit) * kRowTile + in_tile] = sum;
  }
}

}  // namespace kvanta::kernels::cuda
