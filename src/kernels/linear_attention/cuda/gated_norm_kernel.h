// Gates and norms of recurrent layers' outputs. Include the primitives first.
#pragma once

#include "kernels/cuda/row_kernels.h"

namespace kvanta::kernels::cuda {

// Groups of channels take a warp or a block each, as rows of NormOp.
inline LaunchShape ShapeOf(const GatedNormOp& op) {
  const int64_t groups = op.rows * op.groups;
  return {op.width <= kWarpRow ? CeilDiv(groups, int64_t{kRowWarps}) : groups, kRowThreads, 4 * kRowWarps};
}
KVANTA_DEVICE void RunBlock(const GatedNormOp& op) {
  const bool narrow = op.width <= kWarpRow;
  const int64_t index = narrow ? int64_t{BlockIndex()} * kRowWarps + ThreadIndex() / kWarp : BlockIndex();
  if (index >= op.rows * op.groups) return;  // the whole warp; narrow groups have no block barrier
  const int64_t row = index / op.groups, group = index % op.groups;
  const int first = narrow ? ThreadIndex() % kWarp : ThreadIndex();
  const int step = narrow ? kWarp : kRowThreads;
  float* x = op.x + index * op.width;
  const float* gates = op.gates + row * op.gates_stride + op.gate.At(group);
  const auto gated = [&](int64_t i, float value) {
    const float gate = gates[i] * op.gate_scale;
    return (op.silu ? gate : 1.0F) / (1.0F + Exp2(-gate * kLog2E)) * value;
  };
  if (op.weight == nullptr) {
    for (int64_t i = first; i < op.width; i += step) x[i] = gated(i, x[i]);
    return;
  }
  float squares = 0;
  for (int64_t i = first; i < op.width; i += step) {
    if (op.norms_gated_values) x[i] = gated(i, x[i]);
    squares = MultiplyAdd(x[i], x[i], squares);
  }
  const float factor = 1.0F / SquareRoot(SumOfRow(squares, narrow) / static_cast<float>(op.width) + op.eps);
  const float* weight = op.weight + group * op.weight_stride;
  for (int64_t i = first; i < op.width; i += step) {
    const float normed = x[i] * factor * weight[i];
    x[i] = op.norms_gated_values ? normed : gated(i, normed);
  }
}

}  // namespace kvanta::kernels::cuda
