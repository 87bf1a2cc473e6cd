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
#include "kernels/attention/cuda/tasks.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLatentChannels = kMaxLatentRank / kAttendWarps;  // channels per warp

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
  static constexpr int kRowTiles = kQueryRows / kRowsPerMma;
  using Outputs = RegisterOutputs<kRowTiles, BlocksOf(kLatentChannels)>;

  static constexpr int kThreads = kAttendWarps * kWarp;
  static constexpr int kBlocksPerSm = 2;  // resident blocks per multiprocessor

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::UnquantizedQueries(params) +
           QueryBytes(Terms(params.unquantized_decode), kRowTiles, params.unquantized_dim);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    ForTasks(*params.metadata, [&](const SplitTask& task) { Attend(params, task); });
  }

  // Query terms for keys of a decode kind (KvTypeTraits::kTerms).
  static constexpr KVANTA_DEVICE int Terms(DecodeKind decode) {
    return decode == DecodeKind::kF32 ? 3 : decode == DecodeKind::kBf16 ? 2 : 1;
  }

 private:
  static KVANTA_DEVICE void Attend(const AttentionParams& params, const SplitTask& task) {
    const int rank = params.head_dim;
    const QueryTile tile = params.metadata->tiles[task.tile];
    const int unquantized_rows = Layout::kStage + kQueryRows * QueryRows::RowBytes(rank);
    QueryRows::Load<kRowTiles, true>(params, tile, rank, Layout::kStage, Layout::kScales, Layout::kBias, Layout::kSums,
                                     unquantized_rows);
    SyncBlock();
    LatentTypes::Visit(params.k_type.decode, params.k_type, [&](auto type) {
      QueryRows::Pack<decltype(type), kRowTiles>(rank, Layout::kStage, Layout::kScales, Layout::Queries(params));
    });
    if (Layout::HasExact(params)) {
      QueryRows::Pack<StaticKvType<formats::Bf16>, kRowTiles>(rank, Layout::kStage, Layout::kScales,
                                                              Layout::ExactQueries(params));
    }
    UnquantizedTypes::Visit(params.unquantized_decode, params.k_type, [&](auto type) {
      QueryRows::Pack<decltype(type), kRowTiles>(params.unquantized_dim, unquantized_rows, Layout::kScales,
                                                 Layout::UnquantizedQueries(params));
    });
    for (int split = task.first_split; split < task.last_split; ++split) {
      SyncBlock();
      const int index_in_task = split - task.first_split;
      AttendSplit(params, tile, split, task.result_row + index_in_task * task.result_rows,
                  index_in_task == 0 || task.result_rows != 0);
    }
    SyncBlock();
    if (params.CombinesTiles()) CombineFinishedTile(params, task.tile);
  }

  // The block's shared memory; probabilities overwrite the query rows.
  struct Layout {
    static constexpr int kScales = 0;
    static constexpr int kBias = kScales + 4 * kQueryRows;
    static constexpr int kSums = kBias + 4 * kQueryRows;
    static constexpr int kRowMax = kSums + 4 * kQueryRows;  // row maxima of each warp's chunk
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
      return Queries(params) + QueryBytes(Terms(params.k_type.decode), kRowTiles, params.head_dim);
    }
    static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& params) {
      return ExactQueries(params) + (HasExact(params) ? QueryBytes(2, kRowTiles, params.head_dim) : 0);
    }
  };

  static KVANTA_DEVICE void AttendSplit(const AttentionParams& params, const QueryTile& tile, int split, int result_row,
                                        bool first) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    const int channels = params.head_dim - warp * kLatentChannels;  // left from this warp on; may be <= 0
    Outputs outputs;
    const RowFragments<kRowTiles> zeros = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) outputs.Store(block, zeros);
    RowState<kRowTiles> state;
    InitRowState<kRowTiles>(params.k_type.decode, state);

    const int step = ChunkTokens(params);
    const int split_begin = split * kSplitTokens;
    const int last = tile.first_position + tile.tokens - 1;
    const int end = last + 1 < split_begin + kSplitTokens ? last + 1 : split_begin + kSplitTokens;
    const int begin = FirstVisibleStep(params, tile, split_begin, kAttendWarps * step);
    const auto pages = SharedPageTable::Gathered(params, tile, Layout::kPages, split_begin >> params.page_shift);
    pages.Load(params, tile, end, ThreadIndex(), Layout::kSplitPages);
    SyncBlock();
    for (int position = begin; position < end; position += kAttendWarps * step) {
      RowFragments<kRowTiles> s;
      const int own = position + warp * step;
      if (own < end) {
        Score(params, tile, own, pages, lane, s);
      } else {
        KVANTA_UNROLL
        for (int i = 0; i < 8 * kRowTiles; ++i) s[i / 8][i / 4 % 2][i % 4] = kMinusInfinity;
      }
      RowValues<kRowTiles> rescale;
      StoreProbs(warp, lane, s, state, rescale);
      for (int chunk = 0; chunk < kAttendWarps && position + chunk * step < end; ++chunk) {
        if (channels <= 0) break;
        AddValues(params, tile, position + chunk * step, pages, Layout::kStage + chunk * Layout::kProbBytes + 16 * lane,
                  warp, lane, rescale, state, outputs);
        ForRows<kRowTiles>([&](int row_tile, int q) { rescale[row_tile][q] = 1; });
      }
    }
    StoreSplit(params, tile, result_row, first, warp, lane, state, outputs);
  }

  static KVANTA_DEVICE void Score(const AttentionParams& params, const QueryTile& tile, int position,
                                  const SharedPageTable& pages, int lane, RowFragments<kRowTiles>& s) {
    const ChunkLocation location = pages.LookUpPage(params, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    const float scale = params.softmax_scale * (params.softcap > 0 ? 1.0F : kLog2E);
    RowValues<kRowTiles> query;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      query[row_tile][q] = LoadShared<float>(Layout::kScales + 4 * RowOf(row_tile, q, lane % 4)) * scale;
    });
    LatentTypes::Visit(location.exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      using Keys = KeyScores<KvType, kRowTiles, BlocksOf(kMaxLatentRank), false>;
      RowScales<kRowTiles> scales = {};
      ForRows<kRowTiles>([&](int row_tile, int q) {
        scales.row[row_tile][q] = KvType::kBf16 ? scale : query[row_tile][q] * params.k_type.unit;
      });
      const PageCell cell(location.record + offsets.Cell(0), offsets, CodeBytes(type, params.head_dim),
                          params.page_size, location.token);
      Keys::Scores(type, cell, params.head_dim, location.exact ? Layout::ExactQueries(params) : Layout::Queries(params),
                   lane, s);
      Keys::Scale(type, cell, scales, lane / 4, s);
    });
    UnquantizedTypes::Visit(params.unquantized_decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      RowValues<kRowTiles> scales;
      ForRows<kRowTiles>(
          [&](int row_tile, int q) { scales[row_tile][q] = KvType::kBf16 ? scale : query[row_tile][q]; });
      AddUnquantized<KvType, kRowTiles, BlocksOf(kMaxRopeDim)>(params, type, tile, location,
                                                               Layout::UnquantizedQueries(params), scales, lane, s);
    });
    const RowValues<kRowTiles> bias = {};
    ToLogits<kRowTiles>(params, bias, s);
    MaskLogits<kRowTiles>(MakeChunkView<kRowTiles, true>(params, tile, position, lane % 4), lane / 4, s);
  }

  // Probabilities of the four chunks, relative to their common maximum, to shared memory.
  static KVANTA_DEVICE void StoreProbs(int warp, int lane, RowFragments<kRowTiles>& s, RowState<kRowTiles>& state,
                                       RowValues<kRowTiles>& rescale) {
    const auto row_max_at = [lane](int chunk, int row_tile, int q) {
      return Layout::kRowMax + 4 * (chunk * kQueryRows + RowOf(row_tile, q, lane % 4));
    };
    RowValues<kRowTiles> row_max;
    RowMax<kRowTiles>(s, row_max);
    ForRows<kRowTiles>([&](int row_tile, int q) {
      if (lane < 4) StoreShared(row_max_at(warp, row_tile, q), row_max[row_tile][q]);
    });
    SyncBlock();
    ForRows<kRowTiles>([&](int row_tile, int q) {
      float& max = row_max[row_tile][q];
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) {
        max = fmaxf(max, LoadShared<float>(row_max_at(other, row_tile, q)));
      }
    });
    Softmax<kRowTiles>(row_max, s, state, rescale);
    SharedOutputs<kRowTiles> probs{Layout::kStage + warp * Layout::kProbBytes + 16 * lane};
    probs.Store(0, s);
    SyncBlock();
  }

  static KVANTA_DEVICE void AddValues(const AttentionParams& params, const QueryTile& tile, int position,
                                      const SharedPageTable& pages, int probs, int warp, int lane,
                                      const RowValues<kRowTiles>& rescale, RowState<kRowTiles>& state,
                                      Outputs& outputs) {
    const ChunkLocation location = pages.LookUpPage(params, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    const ChunkView<kRowTiles> chunk = MakeChunkView<kRowTiles, true>(params, tile, position, lane % 4);
    RowFragments<kRowTiles> p;
    SharedOutputs<kRowTiles>{probs}.Load(0, p);
    LatentTypes::Visit(location.exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      const int row_bytes = CodeBytes(type, params.head_dim);
      const int first = warp * kLatentChannels;
      const LatentCell cell(
          PageCell(location.record + offsets.Cell(0), offsets, row_bytes, params.page_size, location.token), row_bytes,
          first);
      WeightedValues<KvType, Outputs, false, LatentOperand<KvType>>::Add(
          params, type, cell, tile, chunk, position, params.head_dim - first, p, rescale,
          location.exact ? 1.0F : params.k_type.unit, lane, state, outputs);
    });
  }

  // Combines the split with the task's result so far. Row maxima are the same in all warps; each has the probability
  // sums of its own chunks.
  static KVANTA_DEVICE void StoreSplit(const AttentionParams& params, const QueryTile& tile, int result_row, bool first,
                                       int warp, int lane, RowState<kRowTiles>& state, const Outputs& outputs) {
    const auto sum_at = [lane](int chunk, int row_tile, int q) {
      return Layout::kWarpSums + 4 * (chunk * kQueryRows + RowOf(row_tile, q, lane % 4));
    };
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const float sum = RowSum(state.sum[row_tile][q]);
      if (lane < 4) StoreShared(sum_at(warp, row_tile, q), sum);
    });
    SyncBlock();
    float* const states = params.metadata->split_state + int64_t{result_row} * 2;
    const int count = tile.tokens * tile.heads;
    RowValues<kRowTiles> row_max, sums;  // state of the task, including this split
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int row = RowOf(row_tile, q, lane % 4);
      float sum = 0;
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) sum += LoadShared<float>(sum_at(other, row_tile, q));
      const bool has_previous = !first && row < count;
      const float previous_max = has_previous ? states[2 * row] : kMinusInfinity;
      const float previous_sum = has_previous ? states[2 * row + 1] : 0.0F;
      const float unit = PowerOfTwo(state.exponent[row_tile][q] - kTopExponent);
      float* const to = params.metadata->split_out + (int64_t{result_row} + row) * params.head_dim;
      KVANTA_UNROLL
      for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
        RowFragments<kRowTiles> out;
        outputs.Load(block, out);
        const int channel = warp * kLatentChannels + 32 * block + lane / 4 * 4;
        float values[4], total[4] = {};
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          values[i] = out[row_tile][i / 2][i % 2 * 2 + q] * unit;
          if (has_previous && channel < params.head_dim) total[i] = to[channel + i];
        }
        row_max[row_tile][q] = previous_max;
        sums[row_tile][q] = previous_sum;
        CombineInto(row_max[row_tile][q], sums[row_tile][q], state.max[row_tile][q], sum, total, values, 4);
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (row < count && channel < params.head_dim) to[channel + i] = total[i];
        }
      }
    });
    SyncBlock();
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int row = RowOf(row_tile, q, lane % 4);
      if (warp != 0 || lane >= 4 || row >= count) return;
      states[2 * row] = row_max[row_tile][q];
      states[2 * row + 1] = sums[row_tile][q];
    });
  }
};

}  // namespace kvanta::kernels::cuda
