// Hadamard transform of a row in shared memory by one warp, with the operations and order of formats::Hadamard. Include
// the primitives first.
#pragma once

namespace kvanta::kernels::cuda {

// f32 [head_dim] at byte `row` of shared memory. Needs a warp barrier before; ends with one.
KVANTA_DEVICE void HadamardRow(int row, int head_dim, int block, float norm, int lane) {
  for (int stride = 1; stride < block; stride *= 2) {
    for (int pair = lane; pair < head_dim / 2; pair += kWarp) {
      const int first = row + 4 * (pair / stride * 2 * stride + pair % stride);
      const float a = LoadShared<float>(first);
      const float b = LoadShared<float>(first + 4 * stride);
      StoreShared(first, a + b);
      StoreShared(first + 4 * stride, a - b);
    }
    SyncWarp();
  }
  for (int c = lane; c < head_dim; c += kWarp) StoreShared(row + 4 * c, LoadShared<float>(row + 4 * c) * norm);
  SyncWarp();
}

}  // namespace kvanta::kernels::cuda
