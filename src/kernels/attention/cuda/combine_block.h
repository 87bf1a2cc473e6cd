// The combine kernel: adds up a tile's split results. Include the primitives first.
#pragma once

#include "base/math.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// Factors of the sums of two softmax results in their combination.
struct CombineFactors {
  float keep, take;
};
// Combines the states of two softmax results into the first.
KVANTA_DEVICE CombineFactors CombineStates(float& max, float& sum, float more_max, float more_sum) {
  const float new_max = fmaxf(max, more_max);
  const float base = new_max == kMinusInfinity ? 0.0F : new_max;
  const CombineFactors factors{Exp2(max - base), Exp2(more_max - base)};
  max = new_max;
  sum = MultiplyAdd(sum, factors.keep, more_sum * factors.take);
  return factors;
}
// Combines two softmax results of `count` values, (max, sum, out) and (more_max, more_sum, more), into the first.
KVANTA_DEVICE void CombineInto(float& max, float& sum, float more_max, float more_sum, float* out, const float* more,
                               int count) {
  const auto [keep, take] = CombineStates(max, sum, more_max, more_sum);
  for (int i = 0; i < count; ++i) out[i] = MultiplyAdd(out[i], keep, more[i] * take);
}

inline constexpr int kCombineWarps = 4;
inline constexpr int kCombineBatch = 16;  // split results whose loads are in flight while as many are added
// A warp's shared memory: one row, then the factors of kWarp split results.
inline constexpr int kCombineRowBytes = 4 * kMaxLatentRank;
inline constexpr int kCombineBytes = kCombineRowBytes + 16 * kWarp;

inline LaunchShape CombineShape(const AttentionParams& params) {
  return {CeilDiv(int64_t{params.max_tiles} * params.tile_rows, kCombineWarps), kCombineWarps * kWarp,
          kCombineWarps * kCombineBytes};
}

// The factors with which CombineInto adds one split result after the other: computed at once, for a maximum does not
// depend on their order.
struct SplitFactors {
  int at;  // in shared memory

  struct Factors {
    float keep, take;
    float sum;  // the result's, times `take`
  };

  // Computes those of results [first, first + kWarp) of a row, one per lane; zeros beyond `count`. `states`: of result
  // 0, the others `stride` rows apart. `max`: of the results before, and then with these.
  KVANTA_DEVICE void Load(const float* states, int64_t stride, int first, int count, int lane, float& max) const {
    const bool exists = first + lane < count;
    const float* const state = states + (exists ? first + lane : first) * stride * 2;
    const float own_max = exists ? state[0] : kMinusInfinity;
    const float own_sum = state[1];
    SyncWarp();
    StoreShared(at + 4 * lane, own_max);
    SyncWarp();
    float before = max;
    KVANTA_UNROLL
    for (int i = 0; i < kWarp / 4; ++i) {
      const auto four = LoadShared<Vec4>(at + 16 * i);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float other_max = std::bit_cast<float>(four.word[j]);
        if (4 * i + j < lane) before = fmaxf(before, other_max);
        max = fmaxf(max, other_max);
      }
    }
    SyncWarp();
    const float with_own = fmaxf(before, own_max);
    const float base = with_own == kMinusInfinity ? 0.0F : with_own;
    const float take = Exp2(own_max - base);
    StoreShared(at + 16 * lane, Vec4{{std::bit_cast<uint32_t>(Exp2(before - base)), std::bit_cast<uint32_t>(take),
                                      std::bit_cast<uint32_t>(own_sum * take), 0}});
    SyncWarp();
  }

  KVANTA_DEVICE Factors Of(int result) const {
    const auto words = LoadShared<Vec4>(at + 16 * result);
    return {std::bit_cast<float>(words.word[0]), std::bit_cast<float>(words.word[1]),
            std::bit_cast<float>(words.word[2])};
  }
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
  const int64_t stride = metadata.result_stride;
  const bool in_lanes = params.v_hadamard && params.head_dim <= kPerLane * kWarp;
  const bool in_shared = params.v_hadamard && !in_lanes;
  float* const to = params.out + ((tile.row + row / tile.heads) * int64_t{params.heads} + head) * params.head_dim;
  for (int first = 4 * lane; first - 4 * lane < params.head_dim; first += kPerLane * kWarp) {
    const float* const results = metadata.split_out + first_row * params.head_dim + first;
    const auto load = [&](int split, Vec4(&batch)[kCombineBatch]) {
      KVANTA_UNROLL
      for (int i = 0; i < kCombineBatch; ++i) {
        const float* from = results + (split + i) * stride * params.head_dim;
        const bool inside = split + i < tile.num_results && first < params.head_dim;
        batch[i] = inside ? LoadVec4(reinterpret_cast<const uint8_t*>(from)) : Vec4{};
      }
    };
    float out[kPerLane] = {};
    float max = kMinusInfinity;
    float sum = 0;
    if (tile.num_results == 1) {
      if (first < params.head_dim) BitsToFloats(LoadVec4(reinterpret_cast<const uint8_t*>(results)), out);
      max = metadata.split_state[2 * first_row];
      sum = metadata.split_state[2 * first_row + 1];
    } else {
      Vec4 next[kCombineBatch];
      load(0, next);
      for (int split = 0; split < tile.num_results; split += kCombineBatch) {
        Vec4 more[kCombineBatch];
        KVANTA_UNROLL
        for (int i = 0; i < kCombineBatch; ++i) more[i] = next[i];
        load(split + kCombineBatch, next);
        const int in_warp = split % kWarp;
        if (in_warp == 0) {
          factors.Load(metadata.split_state + 2 * first_row, stride, split, tile.num_results, lane, max);
        }
        KVANTA_UNROLL
        for (int i = 0; i < kCombineBatch; ++i) {
          if (split + i >= tile.num_results) break;
          const SplitFactors::Factors f = factors.Of(in_warp + i);
          sum = MultiplyAdd(sum, f.keep, f.sum);
          KVANTA_UNROLL
          for (int c = 0; c < kPerLane; ++c) {
            out[c] = MultiplyAdd(out[c], f.keep, std::bit_cast<float>(more[i].word[c]) * f.take);
          }
        }
      }
    }
    if (params.sinks != nullptr) {
      const float no_value[kPerLane] = {};
      CombineInto(max, sum, params.sinks[head] * kLog2E, 1.0F, out, no_value, kPerLane);
    }
    KVANTA_UNROLL
    for (int c = 0; c < kPerLane; ++c) out[c] = out[c] / sum;
    if (in_lanes) HadamardLanes(out, params.hadamard_block, params.hadamard_norm, lane);
    KVANTA_UNROLL
    for (int c = 0; c < kPerLane; ++c) {
      if (first >= params.head_dim) continue;
      if (in_shared) {
        StoreShared(base + 4 * (first + c), out[c]);
      } else {
        to[first + c] = out[c];
      }
    }
  }
  if (!in_shared) return;
  SyncWarp();
  HadamardRow(base, params.head_dim, params.hadamard_block, params.hadamard_norm, lane);
  for (int c = lane; c < params.head_dim; c += kWarp) to[c] = LoadShared<float>(base + 4 * c);
}

}  // namespace kvanta::kernels::cuda
