// The Hadamard transform of a row in shared memory by one warp: every element's operations and their order are those of
// formats::Hadamard. A unit that includes this has included the primitives.
#pragma once

namespace kvanta::kernels::cuda {

// f32 [head_dim] from byte `row` of shared memory on; a barrier of the warp before and after.
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
