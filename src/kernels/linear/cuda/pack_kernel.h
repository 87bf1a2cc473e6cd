// Operations that pack rows of x as B operands of a linear layer. Include the primitives first.
#pragma once

#include "kernels/cuda/row_kernels.h"
#include "kernels/linear/cuda/pack_row.h"

namespace kvanta::kernels::cuda {

inline constexpr int kPackWarps = 8;

inline LaunchShape ShapeOf(const PackOp& op) {
  return {op.rows, kPackWarps * kWarp, 4 * kPackWarps};
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
  PackRow<kPackWarps>(op.kind, op.out, row, op.in, [x](int64_t k) { return x[k]; });
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
  PackRow<kPackWarps>(op.pack.kind, op.pack.out, row, op.width, [out](int64_t k) { return out[k]; });
}

inline LaunchShape ShapeOf(const ActivatePackOp& op) {
  return {op.activate.rows, kRowThreads, 4 * kRowWarps};
}
KVANTA_DEVICE void RunBlock(const ActivatePackOp& op) {
  const int64_t row = BlockIndex();
  PackRow<kPackWarps>(op.pack.kind, op.pack.out, row, op.activate.width,
                      [&](int64_t k) { return GatedValue(op.activate, row, k); });
}

}  // namespace kvanta::kernels::cuda
