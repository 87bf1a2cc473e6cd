// Matrix product of +query of a row in shared memory by one warp, with the operations and order of
// formats::RowTransform::Forward. Include the primitives first.
#pragma once

#include "formats/transform.h"

namespace kvanta::kernels::cuda {

// f32 [head_dim] at byte `row` of shared memory, head_dim at most kMaxHeadDim; matrix: as for formats::MultiplyRow.
// Needs a warp barrier before; ends with one.
KVANTA_DEVICE void MultiplyRow(int row, const float* matrix, int head_dim, int lane) {
  constexpr int kMaxPerLane = kMaxHeadDim / kWarp;
  const int64_t stride = formats::MatrixStride(head_dim);
  float sums[kMaxPerLane] = {};
  for (int j = 0; j < head_dim; ++j) {
    const auto x = LoadShared<float>(row + 4 * j);
    KVANTA_UNROLL
    for (int i = 0; i < kMaxPerLane; ++i) {
      const int c = i * kWarp + lane;
      if (c < head_dim) sums[i] = sums[i] + matrix[j * stride + c] * x;
    }
  }
  SyncWarp();
  KVANTA_UNROLL
  for (int i = 0; i < kMaxPerLane; ++i) {
    const int c = i * kWarp + lane;
    if (c < head_dim) StoreShared(row + 4 * c, sums[i] == sums[i] ? sums[i] : std::bit_cast<float>(0x7fc00000U));
  }
  SyncWarp();
}

}  // namespace kvanta::kernels::cuda
