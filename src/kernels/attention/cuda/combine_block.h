// Adds up a tile's split results: by the block that computes the last of them, or by a kernel of its own. Include the
// primitives first.
#pragma once

#include "base/math.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/row_state.h"
#include "kernels/linear/cuda/pack_row.h"

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
inline constexpr int kCombineLaneChannels = 4;  // channels that a lane has at once
// Split results whose loads are in flight while as many are added: by a kernel of its own, or in an attention kernel,
// which has fewer registers.
inline constexpr int kCombineBatch = 16;
inline constexpr int kCombineTileBatch = 4;

// A lane's outputs of wider heads are transformed in shared memory.
constexpr KVANTA_DEVICE bool TransformsInShared(const AttentionParams& params) {
  return params.v_hadamard && params.head_dim > kCombineLaneChannels * kWarp;
}
// A warp's shared memory: the factors of kWarp split results, then a row.
constexpr KVANTA_DEVICE int CombineBytes(const AttentionParams& params) {
  return 16 * kWarp + (TransformsInShared(params) ? 4 * params.head_dim : 0);
}

inline LaunchShape CombineShape(const AttentionParams& params) {
  return {CeilDiv(int64_t{params.max_tiles} * params.tile_rows, kCombineWarps), kCombineWarps * kWarp,
          kCombineWarps * CombineBytes(params)};
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
    const float own_max = exists ? LoadFresh(state) : kMinusInfinity;
    const float own_sum = LoadFresh(state + 1);
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

// Outputs of a row and query head: f32, or the operands of the linear layer that reads them.
struct CombinedOutput {
  const AttentionParams& params;
  int64_t row;
  int head;

  // Channels c and c + 1 of the head.
  KVANTA_DEVICE void Store(int c, float even, float odd) const {
    const int64_t width = int64_t{params.heads} * params.head_dim, channel = int64_t{head} * params.head_dim + c;
    if (params.pack.packs && params.row_tiles == 0) {
      StorePackedPair(params.pack.out, row, width / kPanelChannels, channel, even, odd);
    } else {
      params.out[row * width + channel] = even;
      params.out[row * width + channel + 1] = odd;
    }
  }
};

// Combines a row's split results in ascending order, then the head's sink, divides by the probability sum and inverts
// the transform: by a warp, whose shared memory begins at `base`.
template <int kBatch>
KVANTA_DEVICE void CombineRow(const AttentionParams& params, const QueryTile& tile, int row, int base, int lane) {
  constexpr int kPerLane = kCombineLaneChannels;
  const AttentionMetadata& metadata = *params.metadata;
  const SplitFactors factors{base};
  const int shared_row = base + 16 * kWarp;
  const CombinedOutput to{params, tile.row + row / tile.heads, tile.first_head + row % tile.heads};
  const int64_t first_row = tile.result_row + row;
  const int64_t stride = metadata.result_stride;
  const bool in_shared = TransformsInShared(params);
  for (int first = kPerLane * lane; first - kPerLane * lane < params.head_dim; first += kPerLane * kWarp) {
    const float* const results = metadata.split_out + first_row * params.head_dim + first;
    const auto load = [&](int split, Vec4(&batch)[kBatch]) {
      KVANTA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const float* from = results + (split + i) * stride * params.head_dim;
        const bool inside = split + i < tile.num_results && first < params.head_dim;
        batch[i] = inside ? LoadFresh4(from) : Vec4{};
      }
    };
    float out[kPerLane] = {};
    float max = kMinusInfinity;
    float sum = 0;
    if (tile.num_results == 1) {
      if (first < params.head_dim) BitsToFloats(LoadFresh4(results), out);
      max = LoadFresh(metadata.split_state + 2 * first_row);
      sum = LoadFresh(metadata.split_state + 2 * first_row + 1);
    } else {
      Vec4 next[kBatch];
      load(0, next);
      for (int split = 0; split < tile.num_results; split += kBatch) {
        Vec4 more[kBatch];
        KVANTA_UNROLL
        for (int i = 0; i < kBatch; ++i) more[i] = next[i];
        load(split + kBatch, next);
        const int in_warp = split % kWarp;
        if (in_warp == 0) {
          factors.Load(metadata.split_state + 2 * first_row, stride, split, tile.num_results, lane, max);
        }
        KVANTA_UNROLL
        for (int i = 0; i < kBatch; ++i) {
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
      CombineInto(max, sum, params.sinks[to.head] * kLog2E, 1.0F, out, no_value, kPerLane);
    }
    KVANTA_UNROLL
    for (int c = 0; c < kPerLane; ++c) out[c] = out[c] / sum;
    if (params.v_hadamard && !in_shared) HadamardLanes(out, params.hadamard_block, params.hadamard_norm, lane);
    if (first >= params.head_dim) continue;
    KVANTA_UNROLL
    for (int c = 0; c < kPerLane; c += 2) {
      if (in_shared) {
        StoreShared(shared_row + 4 * (first + c), out[c]);
        StoreShared(shared_row + 4 * (first + c + 1), out[c + 1]);
      } else {
        to.Store(first + c, out[c], out[c + 1]);
      }
    }
  }
  if (!in_shared) return;
  SyncWarp();
  HadamardRow(shared_row, params.head_dim, params.hadamard_block, params.hadamard_norm, lane);
  for (int c = 2 * lane; c < params.head_dim; c += 2 * kWarp) {
    to.Store(c, LoadShared<float>(shared_row + 4 * c), LoadShared<float>(shared_row + 4 * (c + 1)));
  }
  SyncWarp();  // before another row takes its place
}

// The combine kernel: one warp per row of each tile.
KVANTA_DEVICE void CombineBlock(const AttentionParams& params) {
  const int warp = ThreadIndex() / kWarp;
  const int item = BlockIndex() * kCombineWarps + warp;
  if (item >= params.metadata->tile_count * params.tile_rows) return;
  const QueryTile tile = params.metadata->tiles[item / params.tile_rows];
  const int row = item % params.tile_rows;
  if (row >= tile.tokens * tile.heads) return;
  CombineRow<kCombineBatch>(params, tile, row, warp * CombineBytes(params), ThreadIndex() & (kWarp - 1));
}

// After a task of a tile, by the block that had it: combines the tile if all of its tasks are finished, and packs its
// row if all tiles are, unless parts of rows are packed. Overwrites the block's shared memory; needs a block barrier
// before and ends with one.
KVANTA_DEVICE_CALL void CombineFinishedTile(const AttentionParams& params, int tile_index) {
  const QueryTile tile = params.metadata->tiles[tile_index];
  if (tile.num_tasks > 1 && !IsLastToArrive(params.metadata->finished_tasks + tile_index, tile.num_tasks)) return;
  const int warp = ThreadIndex() / kWarp;
  for (int row = warp; row < tile.tokens * tile.heads; row += kAttendWarps) {
    CombineRow<kCombineTileBatch>(params, tile, row, warp * CombineBytes(params), ThreadIndex() & (kWarp - 1));
  }
  SyncBlock();
  if (params.row_tiles == 0 || !IsLastToArrive(params.metadata->finished_tiles + tile.row, params.row_tiles)) {
    return;
  }
  const int64_t width = int64_t{params.heads} * params.head_dim;
  const float* const out = params.out + tile.row * width;
  PackRow<kAttendWarps>(params.pack.kind, params.pack.out, tile.row, width,
                        [out](int64_t k) { return LoadFresh(out + k); });
  SyncBlock();
}

}  // namespace kvanta::kernels::cuda
