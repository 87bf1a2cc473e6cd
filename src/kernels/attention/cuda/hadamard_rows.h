// Hadamard transform of a row by one warp, with the operations and order of formats::Hadamard. Include
// the primitives first.
#pragma once

namespace kvanta::kernels::cuda {

// f32 [head_dim] at byte `row` of shared memory; block: a power of two. Needs a warp barrier before; ends with one.
KVANTA_DEVICE void HadamardRow(int row, int head_dim, int block, float norm, int lane) {
  for (int stride = 1; stride < block; stride *= 2) {
    for (int pair = lane; pair < head_dim / 2; pair += kWarp) {
      const int first = row + 4 * (2 * pair - (pair & (stride - 1)));
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

// The same of up to 128 channels, 4 from 4 * lane on in each lane.
KVANTA_DEVICE void HadamardLanes(float (&x)[4], int block, float norm, int lane) {
  const auto butterfly = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  };
  if (block > 1) {
    butterfly(x[0], x[1]);
    butterfly(x[2], x[3]);
  }
  if (block > 2) {
    butterfly(x[0], x[2]);
    butterfly(x[1], x[3]);
  }
  for (int mask = 1; 4 * mask < block; mask *= 2) {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float other = ShuffleXor(x[i], mask);
      x[i] = (lane & mask) == 0 ? x[i] + other : other - x[i];
    }
  }
  KVANTA_UNROLL
  for (int i = 0; i < 4; ++i) x[i] *= norm;
}

}  // namespace kvanta::kernels::cuda
