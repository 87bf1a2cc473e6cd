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
inline constexpr int kCombineBatch = 16;  // split results whose loads are in flight together
// A warp's shared memory: one row, then the factors of kWarp split results.
inline constexpr int kCombineRowBytes = 4 * kMaxLatentRank;
inline constexpr int kCombineBytes = kCombineRowBytes + 3 * 4 * kWarp;

inline LaunchShape CombineShape(const AttentionParams& params) {
  return {CeilDiv(int64_t{params.max_tiles} * params.tile_rows, kCombineWarps), kCombineWarps * kWarp,
          kCombineWarps * kCombineBytes};
}

// The factors with which CombineInto adds one split result after the other: computed at once, for a maximum does not
// depend on their order.
struct SplitFactors {
  int at;  // in shared memory

  // Computes those of results [first, first + kWarp) of a row, one per lane; zeros beyond `count`. `max`: of the
  // results before, and then with these.
  KVANTA_DEVICE void Load(const float* states, int first, int count, int lane, float& max) const {
    const bool exists = first + lane < count;
    const int64_t result = int64_t{exists ? first + lane : first} * kQueryRows;
    const float own_max = exists ? states[2 * result] : kMinusInfinity;
    const float own_sum = states[2 * result + 1];
    StoreShared(KeepAt(lane), own_max);
    SyncWarp();
    float before = max;
    for (int other = 0; other < kWarp; ++other) {
      const auto other_max = LoadShared<float>(KeepAt(other));
      if (other < lane) before = fmaxf(before, other_max);
      max = fmaxf(max, other_max);
    }
    SyncWarp();
    const float with_own = fmaxf(before, own_max);
    const float base = with_own == kMinusInfinity ? 0.0F : with_own;
    const float take = Exp2(own_max - base);
    StoreShared(KeepAt(lane), Exp2(before - base));
    StoreShared(TakeAt(lane), take);
    StoreShared(SumAt(lane), own_sum * take);
    SyncWarp();
  }

  KVANTA_DEVICE float Keep(int result) const { return LoadShared<float>(KeepAt(result)); }
  KVANTA_DEVICE float Take(int result) const { return LoadShared<float>(TakeAt(result)); }
  KVANTA_DEVICE float Sum(int result) const { return LoadShared<float>(SumAt(result)); }

 private:
  KVANTA_DEVICE int KeepAt(int result) const { return at + 4 * result; }
  KVANTA_DEVICE int TakeAt(int result) const { return at + 4 * (kWarp + result); }
  KVANTA_DEVICE int SumAt(int result) const { return at + 4 * (2 * kWarp + result); }
};

// One warp per row of each tile: combines split results in ascending order, then the head's sink, divides by the
// probability sum and inverts the transform.
KVANTA_DEVICE void CombineBlock(const AttentionParams& params) {
  const int lane = ThreadIndex() & (kWarp - 1);
  const int warp = ThreadIndex() / kWarp;
  const int item = BlockIndex() * kCombineWarps + warp;
  const AttentionMetadata& metadata = *params.metadata;
  if (item >= metadata.tile_count * params.tile_rows) return;
  const QueryTile tile = metadata.tiles[item / params.tile_rows];
  const int row = item % params.tile_rows;
  if (row >= tile.tokens * tile.heads) return;
  constexpr int kPerLane = 4;
  const int base = warp * kCombineBytes;
  const SplitFactors factors{base + kCombineRowBytes};
  const int head = tile.first_head + row % tile.heads;
  const int64_t first_row = tile.result_row + row;
  for (int first = 4 * lane; first - 4 * lane < params.head_dim; first += kPerLane * kWarp) {
    const float* const results = metadata.split_out + first_row * params.head_dim + first;
    float out[kPerLane] = {};
    float max = kMinusInfinity;
    float sum = 0;
    for (int split = 0; split < tile.num_results; split += kCombineBatch) {
      Vec4 more[kCombineBatch];
      KVANTA_UNROLL
      for (int i = 0; i < kCombineBatch; ++i) {
        const float* from = results + int64_t{split + i} * kQueryRows * params.head_dim;
        const bool inside = split + i < tile.num_results && first < params.head_dim;
        more[i] = inside ? LoadVec4(reinterpret_cast<const uint8_t*>(from)) : Vec4{};
      }
      const int in_warp = split % kWarp;
      if (in_warp == 0) factors.Load(metadata.split_state + 2 * first_row, split, tile.num_results, lane, max);
      KVANTA_UNROLL
      for (int i = 0; i < kCombineBatch; ++i) {
        if (split + i >= tile.num_results) break;
        const float keep = factors.Keep(in_warp + i);
        const float take = factors.Take(in_warp + i);
        sum = MultiplyAdd(sum, keep, factors.Sum(in_warp + i));
        KVANTA_UNROLL
        for (int c = 0; c < kPerLane; ++c) {
          out[c] = MultiplyAdd(out[c], keep, std::bit_cast<float>(more[i].word[c]) * take);
        }
      }
      SyncWarp();
    }
    if (params.sinks != nullptr) {
      const float no_value[kPerLane] = {};
      CombineInto(max, sum, params.sinks[head] * kLog2E, 1.0F, out, no_value, kPerLane);
    }
    KVANTA_UNROLL
    for (int c = 0; c < kPerLane; ++c) {
      if (first < params.head_dim) StoreShared(base + 4 * (first + c), out[c] / sum);
    }
  }
  SyncWarp();
  if (params.v_hadamard) HadamardRow(base, params.head_dim, params.hadamard_block, params.hadamard_norm, lane);
  float* to = params.out + ((tile.row + row / tile.heads) * int64_t{params.heads} + head) * params.head_dim;
  for (int c = lane; c < params.head_dim; c += kWarp) to[c] = LoadShared<float>(base + 4 * c);
}

}  // namespace kvanta::kernels::cuda
