// Norm and RoPE of a head by one warp, with the operations and order of NormOp and RopeOp (row_kernels.h). Include the
// primitives first.
#pragma once

#include "kernels/head_transform.h"

namespace kvanta::kernels::cuda {

KVANTA_DEVICE bool TransformsHeads(const HeadTransform& transform) {
  return transform.norm_weight != nullptr || transform.cos_sin != nullptr;
}

// Loads a head of a row to f32 at `base` of shared memory, transformed. Ends with a warp barrier.
KVANTA_DEVICE_CALL void LoadHead(const HeadTransform& transform, const float* from, int64_t row, int head, int head_dim,
                                 int base, int lane) {
  if (transform.norm_weight == nullptr) {
    for (int c = lane; c < head_dim; c += kWarp) StoreShared(base + 4 * c, from[c]);
  } else {
    const float* const weight = transform.norm_weight + int64_t{head} * transform.norm_stride;
    float squares = 0;
    for (int c = lane; c < head_dim; c += kWarp) squares = MultiplyAdd(from[c], from[c], squares);
    for (int mask = kWarp / 2; mask > 0; mask /= 2) squares += ShuffleXor(squares, mask);
    const float factor = 1.0F / SquareRoot(squares / static_cast<float>(head_dim) + transform.norm_eps);
    for (int c = lane; c < head_dim; c += kWarp) StoreShared(base + 4 * c, from[c] * factor * weight[c]);
  }
  SyncWarp();
  if (transform.cos_sin == nullptr) return;
  const int half = transform.rotary_dim / 2;
  const float* const cos_sin = transform.cos_sin + transform.positions[row] * transform.rotary_dim;
  for (int pair = lane; pair < half; pair += kWarp) {
    const int low = base + 4 * (transform.interleaved ? 2 * pair : pair);
    const int high = low + 4 * (transform.interleaved ? 1 : half);
    const float cos = cos_sin[pair], sin = cos_sin[half + pair];
    const float a = LoadShared<float>(low), b = LoadShared<float>(high);
    StoreShared(low, a * cos - b * sin);
    StoreShared(high, b * cos + a * sin);
  }
  SyncWarp();
}

// Transforms a head of a row in place, through shared memory at `base`.
KVANTA_DEVICE void TransformHead(const HeadTransform& transform, float* x, int64_t row, int head, int head_dim,
                                 int base, int lane) {
  LoadHead(transform, x, row, head, head_dim, base, lane);
  for (int c = lane; c < head_dim; c += kWarp) x[c] = LoadShared<float>(base + 4 * c);
  SyncWarp();  // before another head takes its place
}

}  // namespace kvanta::kernels::cuda
