// The combine kernel: adds up a tile's split results. Include the primitives first.
#pragma once

#include "base/math.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// Combines two softmax results of `count` values, (max, sum, out) and (more_max, more_sum, more), into the first.
KVANTA_DEVICE void CombineInto(float& max, float& sum, float more_max, float more_sum, float* out, const float* more,
                               int count) {
  const float new_max = fmaxf(max, more_max);
  const float base = new_max == kMinusInfinity ? 0.0F : new_max;
  const float keep = Exp2(max - base);
  const float take = Exp2(more_max - base);
  max = new_max;
  sum = MultiplyAdd(sum, keep, more_sum * take);
  for (int i = 0; i < count; ++i) out[i] = MultiplyAdd(out[i], keep, more[i] * take);
}

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineBytes = 4 * kMaxLatentRank;  // per warp: one row

inline LaunchShape CombineShape(const AttentionParams& params) {
  return {CeilDiv(int64_t{params.max_tiles} * kQueryRows, kCombineWarps), kCombineWarps * kWarp,
          kCombineWarps * kCombineBytes};
}

// One warp per row of each tile: combines split results in ascending order, then the head's sink, divides by the
// probability sum and inverts the transform.
KVANTA_DEVICE void CombineBlock(const AttentionParams& params) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const int item = BlockIndex() * kCombineWarps + warp;
  const AttentionMetadata& metadata = *params.metadata;
  if (item >= metadata.tile_count * kQueryRows) return;
  const QueryTile tile = metadata.tiles[item / kQueryRows];
  const int row = item % kQueryRows;
  if (row >= tile.tokens * tile.heads) return;
  constexpr int kPerLane = 8;
  const int base = warp * kCombineBytes;
  const int head = tile.first_head + row % tile.heads;
  for (int first = lane; first - lane < params.head_dim; first += kPerLane * kWarp) {
    float out[kPerLane] = {};
    float max = kMinusInfinity;
    float sum = 0;
    for (int split = 0; split < tile.num_results; ++split) {
      const int result_row = tile.result_row + split * kQueryRows + row;
      const float* from = metadata.split_out + int64_t{result_row} * params.head_dim;
      float more[kPerLane];
      KVANTA_UNROLL
      for (int i = 0; i < kPerLane; ++i) more[i] = first + 32 * i < params.head_dim ? from[first + 32 * i] : 0.0F;
      CombineInto(max, sum, metadata.split_state[int64_t{2} * result_row],
                  metadata.split_state[int64_t{2} * result_row + 1], out, more, kPerLane);
    }
    if (params.sinks != nullptr) {
      const float no_value[kPerLane] = {};
      CombineInto(max, sum, params.sinks[head] * kLog2E, 1.0F, out, no_value, kPerLane);
    }
    KVANTA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      if (first + 32 * i < params.head_dim) StoreShared(base + 4 * (first + 32 * i), out[i] / sum);
    }
  }
  SyncWarp();
  if (params.v_hadamard) HadamardRow(base, params.head_dim, params.hadamard_block, params.hadamard_norm, lane);
  float* to = params.out + ((tile.row + row / tile.heads) * int64_t{params.heads} + head) * params.head_dim;
  for (int c = lane; c < params.head_dim; c += kWarp) to[c] = LoadShared<float>(base + 4 * c);
}

}  // namespace kvanta::kernels::cuda
