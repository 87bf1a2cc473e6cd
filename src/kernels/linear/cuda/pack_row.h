// Packs rows of x as B operands of a linear layer. For bf16 weights x is rounded to bf16, as on the CPU; for others to
// f16, after a power of two per row that scales its largest value to [2^14, 2^15): 11 bits for every value down to
// 2^-28 of the largest. Include the primitives first.
#pragma once

#include "base/math.h"
#include "kernels/linear/cuda/packed_rows.h"

namespace kvanta::kernels::cuda {

// Bits of the largest magnitude of value(0), ..., value(count - 1); they order like the numbers, with infinity and NaN
// at the top.
template <int kWarps, class Value>
KVANTA_DEVICE uint32_t LargestBits(int64_t count, Value value) {
  uint32_t largest = 0;
  for (int64_t i = ThreadIndex(); i < count; i += kWarps * kWarp) {
    const uint32_t bits = std::bit_cast<uint32_t>(value(i)) & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  const auto max = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  for (int mask = kWarp / 2; mask > 0; mask /= 2) largest = max(largest, ShuffleXor(largest, mask));
  if (ThreadIndex() % kWarp == 0) StoreShared(ThreadIndex() / kWarp * 4, largest);
  SyncBlock();
  for (int warp = 0; warp < kWarps; ++warp) largest = max(largest, LoadShared<uint32_t>(4 * warp));
  return largest;
}

KVANTA_DEVICE float PowerOf2(int biased_exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(biased_exponent) << 23U);
}

// Packs row `row`, value(0), ..., value(in - 1), by a block of kWarps warps, with 4 * kWarps bytes of shared memory.
template <int kWarps, class Value>
KVANTA_DEVICE void PackRow(PanelKind kind, const PackedRows& out, int64_t row, int64_t in, Value value) {
  const bool bf16 = kind == PanelKind::kBf16;
  float scale = 1;
  float factor = 1;
  if (!bf16) {
    const auto exponent = static_cast<int>(LargestBits<kWarps>(in, value) >> 23U);
    if (exponent < 255) {  // otherwise x is not finite, and neither is the result
      const int clamped = exponent < 15 ? 15 : exponent;
      scale = PowerOf2(268 - clamped);
      factor = PowerOf2(clamped - 14);
    }
  }
  if (ThreadIndex() == 0) out.factors[row] = factor;

  const int64_t units = CeilDiv(in, kPanelChannels);
  const int64_t tile = row / kRowTile;
  const auto in_tile = static_cast<int>(row % kRowTile);
  // Four threads per unit, one per lane position t: channels 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16.
  const int t = ThreadIndex() % 4;
  for (int64_t first = 0; first < units; first += kWarps * kWarp / 4) {
    const int64_t unit = first + ThreadIndex() / 4;
    Vec4 codes = {};
    float sum = 0;
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int64_t k = unit * kPanelChannels + i * 8 + 2 * t;
      const float even = unit < units && k < in ? value(k) * scale : 0.0F;
      const float odd = unit < units && k + 1 < in ? value(k + 1) * scale : 0.0F;
      const uint32_t pair = bf16 ? PackBf16(even, odd) : PackF16(even, odd);
      codes.word[i] = pair;
      sum += F16ToFloat(static_cast<uint16_t>(pair)) + F16ToFloat(static_cast<uint16_t>(pair >> 16U));
    }
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);
    if (unit >= units) continue;
    uint8_t* to = out.codes + (((tile * units + unit) * kWarp) + in_tile * 4 + t) * 16;
    *reinterpret_cast<Vec4*>(to) = codes;
    if (!bf16 && t == 0) out.unit_sums[(tile * units + unit) * kRowTile + in_tile] = sum;
  }
}

// Packs two channels for bf16 weights, whose operands have no scale of the row, by kernels whose blocks have a part of
// a row each: channels k and k + 1, k even, of a row of `units` whole units. The pair of channel 0 writes the factor.
KVANTA_DEVICE void StorePackedPair(const PackedRows& out, int64_t row, int64_t units, int64_t k, float even,
                                   float odd) {
  const int64_t unit = row / kRowTile * units + k / kPanelChannels;
  const auto lane = static_cast<int>(row % kRowTile * 4 + k % 8 / 2);
  uint8_t* const to = out.codes + (unit * kWarp + lane) * 16 + k % kPanelChannels / 8 * 4;
  *reinterpret_cast<uint32_t*>(to) = PackBf16(even, odd);
  if (k == 0) out.factors[row] = 1;
}

}  // namespace kvanta::kernels::cuda
