// Packs rows of x as B operands of a linear layer. For bf16 weights x is rounded to bf16, as on the CPU; for others to
// f16, after a power of two per row that scales its largest value to [2^14, 2^15): 11 bits for every value down to
// 2^-28 of the largest. Include the primitives first.
#pragma once

#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

inline constexpr int kPackWarps = 8;

inline LaunchShape ShapeOf(const PackOp& op) {
  return {op.rows, kPackWarps * kWarp, 4 * kPackWarps};
}

// Bits of the largest magnitude of value(0), ..., value(count - 1); they order like the numbers, with infinity and NaN
// at the top.
template <class Value>
KVANTA_DEVICE uint32_t LargestBits(int64_t count, Value value) {
  uint32_t largest = 0;
  for (int64_t i = ThreadIndex(); i < count; i += kPackWarps * kWarp) {
    const uint32_t bits = std::bit_cast<uint32_t>(value(i)) & 0x7FFFFFFFU;
    largest = bits > largest ? bits : largest;
  }
  const auto max = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  for (int mask = kWarp / 2; mask > 0; mask /= 2) largest = max(largest, ShuffleXor(largest, mask));
  if (ThreadIndex() % kWarp == 0) StoreShared(ThreadIndex() / kWarp * 4, largest);
  SyncBlock();
  for (int warp = 0; warp < kPackWarps; ++warp) largest = max(largest, LoadShared<uint32_t>(4 * warp));
  return largest;
}

KVANTA_DEVICE float PowerOf2(int biased_exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(biased_exponent) << 23U);
}

// Packs row `row`, value(0), ..., value(in - 1), by a block.
template <class Value>
KVANTA_DEVICE void PackRow(PanelKind kind, const PackedRows& out, int64_t row, int64_t in, Value value) {
  const bool bf16 = kind == PanelKind::kBf16;
  float scale = 1;
  float factor = 1;
  if (!bf16) {
    const auto exponent = static_cast<int>(LargestBits(in, value) >> 23U);
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
  for (int64_t first = 0; first < units; first += kPackWarps * kWarp / 4) {
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

// One block per row.
KVANTA_DEVICE void RunBlock(const PackOp& op) {
  const int64_t row = BlockIndex();
  const float* x = op.x + row * op.x_stride;
  if (op.grouped.padded_rows != 0) {
    const int64_t in_member = row % op.grouped.padded_rows;
    if (in_member >= op.grouped.used_rows) return;  // padding: the results are not used either
    x = op.x + row / op.grouped.padded_rows * op.x_member_stride + in_member * op.x_stride;
  }
  PackRow(op.kind, op.out, row, op.in, [x](int64_t k) { return x[k]; });
}

// ---- operations that pack what they compute, one block per row

static_assert(kPackWarps == kRowWarps);

inline LaunchShape ShapeOf(const AddNormOp& op) {
  return {op.rows, kRowThreads, 4 * kRowWarps};
}
KVANTA_DEVICE void RunBlock(const AddNormOp& op) {
  const int64_t row = BlockIndex();
  float* x = op.x + row * op.width;
  float squares = 0;
  for (int64_t i = ThreadIndex(); i < op.width; i += kRowThreads) {
    if (op.y != nullptr) x[i] += op.y[row * op.width + i];
    squares = MultiplyAdd(x[i], x[i], squares);
  }
  const float factor = 1.0F / SquareRoot(SumOfRow(squares, false) / static_cast<float>(op.width) + op.eps);
  float* out = op.out + row * op.width;
  for (int64_t i = ThreadIndex(); i < op.width; i += kRowThreads) out[i] = x[i] * factor * op.weight[i];
  if (!op.pack.packs) return;
  SyncBlock();  // other threads' values, and the sums in shared memory
  PackRow(op.pack.kind, op.pack.out, row, op.width, [out](int64_t k) { return out[k]; });
}

inline LaunchShape ShapeOf(const ActivatePackOp& op) {
  return {op.activate.rows, kRowThreads, 4 * kRowWarps};
}
KVANTA_DEVICE void RunBlock(const ActivatePackOp& op) {
  const int64_t row = BlockIndex();
  PackRow(op.pack.kind, op.pack.out, row, op.activate.width,
          [&](int64_t k) { return GatedValue(op.activate, row, k); });
}

}  // namespace kvanta::kernels::cuda
