// Partial results of a tile's runs, merged. A unit that includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

// (peak, sum, out) and (more_max, more_sum, more) of `count` values, into the first.
KVANTA_DEVICE void CombineInto(float& max_value, float& sum, float more_max, float more_sum, float* out,
                               const float* more, int count) {
  const float greatest = fmaxf(max_value, more_max);
  const float base = greatest == kMinusInfinity ? 0.0F : greatest;
  const float keep = Exp2(max_value - base);
  const float take = Exp2(more_max - base);
  max_value = greatest;
  sum = MultiplyAdd(sum, keep, more_sum * take);
  for (int i = 0; i < count; ++i) out[i] = MultiplyAdd(out[i], keep, more[i] * take);
}

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineBytes = 4 * kMaxLatentRank;  // of a warp: a row

inline LaunchShape CombineShape(const AttentionParams& layer) {
  return {(int64_t{layer.max_tiles} * kQueryRows + kCombineWarps - 1) / kCombineWarps, kCombineWarps * kWarp,
          kCombineWarps * kCombineBytes};
}

// A warp for each row of each tile: its partial results in ascending order, divided by the weights' sum, and
// transformed back.
KVANTA_DEVICE void CombineBlock(const AttentionParams& layer) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const int item = BlockIndex() * kCombineWarps + warp;
  const AttentionMetadata& step = *layer.step;
  if (item >= step.tile_count * kQueryRows) return;
  const QueryTile tile = step.tiles[item / kQueryRows];
  const int row = item % kQueryRows;
  if (row >= tile.tokens * tile.heads) return;
  constexpr int kPerLane = 8;
  const int base = warp * kCombineBytes;
  for (int first = lane; first - lane < layer.head_dim; first += kPerLane * kWarp) {
    float out[kPerLane] = {};
    float max_value = kMinusInfinity;
    float sum = 0;
    for (int part = 0; part < tile.parts; ++part) {
      const int slot = tile.slot + part * kQueryRows + row;
      const float* from = step.split_out + int64_t{slot} * layer.head_dim;
      float more[kPerLane];
      KVANTA_UNROLL
      for (int i = 0; i < kPerLane; ++i) more[i] = first + 32 * i < layer.head_dim ? from[first + 32 * i] : 0.0F;
      CombineInto(max_value, sum, step.split_state[int64_t{2} * slot], step.split_state[int64_t{2} * slot + 1], out,
                  more, kPerLane);
    }
    KVANTA_UNROLL
    for (int i = 0; i < kPerLane; ++i) {
      if (first + 32 * i < layer.head_dim) StoreShared(base + 4 * (first + 32 * i), out[i] / sum);
    }
  }
  SyncWarp();
  if (layer.v_hadamard) HadamardRow(base, layer.head_dim, layer.hadamard_block, layer.hadamard_norm, lane);
  const int head = tile.first_head + row % tile.heads;
  float* to = layer.out + ((tile.row + row / tile.heads) * int64_t{layer.heads} + head) * layer.head_dim;
  for (int c = lane; c < layer.head_dim; c += kWarp) to[c] = LoadShared<float>(base + 4 * c);
}

}  // namespace kvanta::kernels::cuda
