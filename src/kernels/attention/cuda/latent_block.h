// Attention over latents (MLA): one cell holds keys and values, shared by all query heads. Include the primitives
// first.
//
// A block computes one tile's attention to one KV split of 1,024 tokens, 128 tokens at a time (64 in pages of 16): each
// of its four warps computes the scores of one chunk; row maxima and probabilities are exchanged through shared memory;
// then each warp accumulates 128 channels over all four chunks, so that outputs of 512 channels fit into registers. A
// row's operations depend on its position alone, as in attention_block.h.
#pragma once

#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/latent_values.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLatentChannels = kMaxLatentRank / kAttendWarps;  // of a warp

template <class List>
struct StaticDispatch;
template <class... Format>
struct StaticDispatch<TypeList<Format...>> {
  using Type = KvTypeDispatch<StaticKvType<Format>...>;
};

struct LatentBlock {
  using LatentTypes = StaticDispatch<LatentFormats>::Type;
  // Rotated channels have the latents' format if that is not quantized.
  using UnquantizedTypes =
      KvTypeDispatch<StaticKvType<formats::Fp16>, StaticKvType<formats::Fp32>, StaticKvType<formats::Bf16>>;
  using Outputs = RegisterOutputs<BlocksOf(kLatentChannels)>;

  static constexpr int kBlocksPerSm = 2;  // resident blocks per multiprocessor

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::UnquantizedQueries(params) + QueryBytes(Terms(params.unquantized_decode), params.unquantized_dim);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    const int rank = params.head_dim;
    for (int index = BlockIndex(); index < params.metadata->task_count; index += Blocks()) {
      const SplitTask task = params.metadata->tasks[index];
      const QueryTile tile = params.metadata->tiles[task.tile];
      const int unquantized_rows = Layout::kStage + kQueryRows * QueryRows::RowBytes(rank);
      QueryRows::Load<true>(params, tile, rank, Layout::kStage, Layout::kScales, Layout::kBias, Layout::kSums,
                            unquantized_rows);
      SyncBlock();
      LatentTypes::Visit(params.k_type.decode, params.k_type, [&](auto type) {
        QueryRows::Pack<decltype(type)>(rank, Layout::kStage, Layout::kScales, Layout::Queries(params));
      });
      if (Layout::HasExact(params)) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(rank, Layout::kStage, Layout::kScales,
                                                     Layout::ExactQueries(params));
      }
      UnquantizedTypes::Visit(params.unquantized_decode, params.k_type, [&](auto type) {
        QueryRows::Pack<decltype(type)>(params.unquantized_dim, unquantized_rows, Layout::kScales,
                                        Layout::UnquantizedQueries(params));
      });
      for (int split = task.first_split; split < task.last_split; ++split) {
        SyncBlock();
        AttendSplit(params, tile, split, task.result_row, split == task.first_split);
      }
      SyncBlock();
    }
  }

 private:
  // Query terms for keys of a decode kind (KvTypeTraits::kTerms).
  static constexpr KVANTA_DEVICE int Terms(DecodeKind decode) {
    return decode == DecodeKind::kF32 ? 3 : decode == DecodeKind::kBf16 ? 2 : 1;
  }

  // The block's shared memory; probabilities overwrite the query rows.
  struct Layout {
    static constexpr int kScales = 0;
    static constexpr int kBias = kScales + 4 * kQueryRows;
    static constexpr int kSums = kBias + 4 * kQueryRows;
    static constexpr int kRowMax = kSums + 4 * kQueryRows;  // of each warp's chunk
    static constexpr int kWarpSums = kRowMax + kAttendWarps * 4 * kQueryRows;
    static constexpr int kPages = kWarpSums + kAttendWarps * 4 * kQueryRows;
    static constexpr int kSplitPages = kSplitTokens / kMinPage;  // maximum
    static constexpr int kStage = kPages + kSplitPages * 8;
    static constexpr int kProbBytes = 4 * 16 * kWarp;  // per chunk

    // Unquantized formats have no exact pages.
    static constexpr KVANTA_DEVICE bool HasExact(const AttentionParams& params) { return params.exact.base != nullptr; }
    static constexpr KVANTA_DEVICE int Queries(const AttentionParams& params) {
      const int rows =
          kQueryRows * (QueryRows::RowBytes(params.head_dim) + QueryRows::RowBytes(params.unquantized_dim));
      const int probs = kAttendWarps * kProbBytes;
      return kStage + (rows > probs ? rows : probs);
    }
    static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& params) {
      return Queries(params) + QueryBytes(Terms(params.k_type.decode), params.head_dim);
    }
    static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& params) {
      return ExactQueries(params) + (HasExact(params) ? QueryBytes(2, params.head_dim) : 0);
    }
  };

  static KVANTA_DEVICE void AttendSplit(const AttentionParams& params, const QueryTile& tile, int split, int result_row,
                                        bool first) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    const int channels = params.head_dim - warp * kLatentChannels;  // of this warp and the following ones; may be <= 0
    Outputs outputs;
    const float zeros[4][4] = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) outputs.Store(block, zeros);
    RowState state;
    int tokens[2];
    InitRowState(tile, params.k_type.decode, lane, state, tokens);

    const int step = ChunkTokens(params);
    const int split_begin = split * kSplitTokens;
    const int last = tile.first_position + tile.tokens - 1;
    const int end = last + 1 < split_begin + kSplitTokens ? last + 1 : split_begin + kSplitTokens;
    const int begin = FirstVisibleStep(params, tile, split_begin, kAttendWarps * step);
    const SharedPageTable pages{Layout::kPages, split_begin >> params.page_shift};
    pages.Load(params, tile, end, ThreadIndex(), Layout::kSplitPages);
    SyncBlock();
    for (int position = begin; position < end; position += kAttendWarps * step) {
      float s[4][4];
      const int own = position + warp * step;
      if (own < end) {
        Score(params, tile, own, pages, tokens, lane, s);
      } else {
        KVANTA_UNROLL
        for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = kMinusInfinity;
      }
      float rescale[2];
      StoreProbs(warp, lane, s, state, rescale);
      for (int chunk = 0; chunk < kAttendWarps && position + chunk * step < end; ++chunk) {
        if (channels <= 0) break;
        AddValues(params, tile, position + chunk * step, pages, tokens,
                  Layout::kStage + chunk * Layout::kProbBytes + 16 * lane, warp, lane, rescale, state, outputs);
        rescale[0] = rescale[1] = 1;
      }
    }
    StoreSplit(params, tile, result_row, first, warp, lane, state, outputs);
  }

  static KVANTA_DEVICE void Score(const AttentionParams& params, const QueryTile& tile, int position,
                                  const SharedPageTable& pages, const int (&tokens)[2], int lane, float (&s)[4][4]) {
    const ChunkLocation location = pages.LookUpPage(params, tile, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    const float scale = params.softmax_scale * (params.softcap > 0 ? 1.0F : kLog2E);
    float query[2];
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row)
      query[row] = LoadShared<float>(Layout::kScales + 4 * (lane / 4 + 8 * row)) * scale;
    LatentTypes::Visit(location.exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      using Keys = KeyScores<KvType, BlocksOf(kMaxLatentRank), false>;
      const RowScales scales{{(KvType::kBf16 ? scale : query[0] * params.k_type.unit),
                              (KvType::kBf16 ? scale : query[1] * params.k_type.unit)},
                             {}};
      const PageCell cell(location.record + offsets.Cell(0), offsets, CodeBytes(type, params.head_dim),
                          params.page_size, location.token);
      Keys::Scores(type, cell, params.head_dim, location.exact ? Layout::ExactQueries(params) : Layout::Queries(params),
                   lane, s);
      Keys::Scale(type, cell, scales, lane % 4, s);
    });
    UnquantizedTypes::Visit(params.unquantized_decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      const float scales[2] = {KvType::kBf16 ? scale : query[0], KvType::kBf16 ? scale : query[1]};
      AddUnquantized<KvType, BlocksOf(kMaxRopeDim)>(params, type, tile, location, Layout::UnquantizedQueries(params),
                                                    scales, lane, s);
    });
    const float bias[2] = {};
    ToLogits(params, MakeChunkView(params, tile, position, tokens), bias, lane % 4, s);
  }

  // Probabilities of the four chunks, relative to their common maximum, to shared memory.
  static KVANTA_DEVICE void StoreProbs(int warp, int lane, float (&s)[4][4], RowState& state, float (&rescale)[2]) {
    const auto row_max_at = [lane](int chunk, int row) {
      return Layout::kRowMax + 4 * (chunk * kQueryRows + lane / 4 + 8 * row);
    };
    float row_max[2];
    RowMax(s, row_max);
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      if (lane % 4 == 0) StoreShared(row_max_at(warp, row), row_max[row]);
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) {
        row_max[row] = fmaxf(row_max[row], LoadShared<float>(row_max_at(other, row)));
      }
    }
    Softmax(row_max, s, state, rescale);
    SharedOutputs probs{Layout::kStage + warp * Layout::kProbBytes + 16 * lane};
    probs.Store(0, s);
    SyncBlock();
  }

  static KVANTA_DEVICE void AddValues(const AttentionParams& params, const QueryTile& tile, int position,
                                      const SharedPageTable& pages, const int (&tokens)[2], int probs, int warp,
                                      int lane, const float (&rescale)[2], RowState& state, Outputs& outputs) {
    const ChunkLocation location = pages.LookUpPage(params, tile, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    const ChunkView chunk = MakeChunkView(params, tile, position, tokens);
    float p[4][4];
    SharedOutputs{probs}.Load(0, p);
    LatentTypes::Visit(location.exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      const int row_bytes = CodeBytes(type, params.head_dim);
      const int first = warp * kLatentChannels;
      const LatentCell cell(
          PageCell(location.record + offsets.Cell(0), offsets, row_bytes, params.page_size, location.token), row_bytes,
          first);
      WeightedValues<KvType, Outputs, LatentOperand<KvType>>::Add(
          params, type, cell, tile, chunk, position, params.head_dim - first, p, rescale,
          location.exact ? 1.0F : params.k_type.unit, lane, state, outputs);
    });
  }

  // Combines the split with the task's result so far. Row maxima are the same in all warps; each has the probability
  // sums of its own chunks.
  static KVANTA_DEVICE void StoreSplit(const AttentionParams& params, const QueryTile& tile, int result_row, bool first,
                                       int warp, int lane, RowState& state, const Outputs& outputs) {
    const auto sum_at = [lane](int chunk, int row) {
      return Layout::kWarpSums + 4 * (chunk * kQueryRows + lane / 4 + 8 * row);
    };
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      state.sum[row] += ShuffleXor(state.sum[row], 1);
      state.sum[row] += ShuffleXor(state.sum[row], 2);
      if (lane % 4 == 0) StoreShared(sum_at(warp, row), state.sum[row]);
    }
    SyncBlock();
    float* const states = params.metadata->split_state + int64_t{result_row} * 2;
    const int count = tile.tokens * tile.heads;
    float row_max[2], sums[2];  // of the task, including this split
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int tile_row = lane / 4 + 8 * row;
      float sum = 0;
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) sum += LoadShared<float>(sum_at(other, row));
      const bool has_previous = !first && tile_row < count;
      const float previous_max = has_previous ? states[2 * tile_row] : kMinusInfinity;
      const float previous_sum = has_previous ? states[2 * tile_row + 1] : 0.0F;
      const float unit = PowerOfTwo(state.exponent[row] - kTopExponent);
      float* const to = params.metadata->split_out + (int64_t{result_row} + tile_row) * params.head_dim;
      KVANTA_UNROLL
      for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
        float out[4][4];
        outputs.Load(block, out);
        const int channel = warp * kLatentChannels + 32 * block + lane % 4 * 8;
        float values[8], total[8] = {};
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) {
          values[i] = out[i % 4][2 * row + i / 4] * unit;
          if (has_previous && channel < params.head_dim) total[i] = to[channel + i];
        }
        row_max[row] = previous_max;
        sums[row] = previous_sum;
        CombineInto(row_max[row], sums[row], state.max[row], sum, total, values, 8);
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (tile_row < count && channel < params.head_dim) to[channel + i] = total[i];
        }
      }
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int tile_row = lane / 4 + 8 * row;
      if (warp != 0 || lane % 4 != 0 || tile_row >= count) continue;
      states[2 * tile_row] = row_max[row];
      states[2 * tile_row + 1] = sums[row];
    }
  }
};

}  // namespace kvanta::kernels::cuda
