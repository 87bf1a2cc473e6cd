// Scores of tokens by an indexer's keys (ScoreTokensOp). Include the primitives first.
//
// A block has one row and a split of 1,024 tokens at absolute positions, whose chunks its warps take in turn: the
// products of keys and queries of attention, 16 heads at a time. A score is a chain of operations of its own: heads are
// added in the same order whatever the batch, the chunk or the context.
#pragma once

#include "kernels/attention/cuda/latent_block.h"
#include "kernels/attention/cuda/sparse_ops.h"

namespace kvanta::kernels::cuda {

struct ScoreBlock {
  using KeyTypes = LatentTypes;
  static constexpr int kRowTiles = kQueryRows / kRowsPerMma;
  static constexpr int kThreads = kAttendWarps * kWarp;

  static constexpr int SharedBytes(const AttentionParams& keys) {
    return Layout::ExactQueries(keys) + (keys.exact.base != nullptr ? QueryBytes(2, kRowTiles, keys.head_dim) : 0);
  }
  static LaunchShape Shape(const ScoreTokensOp& op) { return {op.blocks, kThreads, SharedBytes(op.keys)}; }

  static KVANTA_DEVICE void Run(const ScoreTokensOp& op) {
    const SparseStep& step = *op.wave.step;
    const int32_t left = step.count - op.wave.first_row;
    const int32_t rows = left < op.wave.max_rows ? left : op.wave.max_rows;
    const int32_t splits = step.score_stride / kSplitTokens;
    for (int item = BlockIndex(); item < rows * splits; item += Blocks()) {
      const int32_t of_wave = item / splits, split = item % splits;
      const SparseRow row = step.rows[op.wave.first_row + of_wave];
      if (split * kSplitTokens > row.position) continue;  // uniform in the block
      float* scores = step.scores + int64_t{of_wave} * step.score_stride + split * kSplitTokens;
      ScoreSplit(op.keys, op.weights + int64_t{row.row} * op.keys.heads, row, split, scores);
    }
  }

 private:
  struct Layout {
    static constexpr int kScales = 0;
    static constexpr int kBias = kScales + 4 * kQueryRows;
    static constexpr int kSums = kBias + 4 * kQueryRows;
    static constexpr int kPages = kSums + 4 * kQueryRows;
    static constexpr int kScores = kPages + kSplitTokens / kMinPage * 8;
    static constexpr int kRows = kScores + 4 * kSplitTokens;

    static constexpr KVANTA_DEVICE int Queries(const AttentionParams& keys) {
      return kRows + kQueryRows * QueryRows::RowBytes(keys.head_dim);
    }
    static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& keys) {
      return Queries(keys) + QueryBytes(QueryTerms(keys.k_type.decode), kRowTiles, keys.head_dim);
    }
  };

  // weights: of the row's heads; scores: of the split's tokens.
  static KVANTA_DEVICE void ScoreSplit(const AttentionParams& keys, const float* weights, const SparseRow& row,
                                       int32_t split, float* scores) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    const int step = ChunkTokens(keys);
    const int begin = split * kSplitTokens;
    const int end = row.position + 1 < begin + kSplitTokens ? row.position + 1 : begin + kSplitTokens;
    QueryTile tile{.page_table = keys.metadata->first_pages[row.sequence],
                   .first_position = row.position,
                   .row = row.row,
                   .tokens = 1};
    const SharedPageTable pages(keys, tile, Layout::kPages, begin >> keys.page_shift);
    SyncBlock();  // the item before has been stored
    pages.Load(keys, tile, end, ThreadIndex(), kSplitTokens / kMinPage);
    for (int head = 0; head < keys.heads; head += kQueryRows) {
      tile.first_head = static_cast<int16_t>(head);
      tile.heads = static_cast<int16_t>(keys.heads - head < kQueryRows ? keys.heads - head : kQueryRows);
      LoadQueries(keys, tile);
      RowValues<kRowTiles> weight;
      ForRows<kRowTiles>([&](int row_tile, int q) {
        const int own = RowOf(row_tile, q, lane % 4);
        weight[row_tile][q] = own < tile.heads ? weights[head + own] : 0.0F;
      });
      for (int position = begin + warp * step; position < end; position += kAttendWarps * step) {
        RowFragments<kRowTiles> s;
        Products(keys, pages.LookUpPage(keys, position), lane, s);
        AddWeighted(s, weight, position - begin, step, head == 0, lane);
      }
      SyncBlock();  // the queries have been read
    }
    for (int i = ThreadIndex(); i < end - begin; i += kThreads) scores[i] = LoadShared<float>(Layout::kScores + 4 * i);
  }

  // Ends with a block barrier.
  static KVANTA_DEVICE void LoadQueries(const AttentionParams& keys, const QueryTile& tile) {
    QueryRows::Load<kRowTiles, false>(keys, tile, keys.head_dim, Layout::kRows, Layout::kScales, Layout::kBias,
                                      Layout::kSums, 0);
    SyncBlock();
    KeyTypes::Visit(keys.k_type.decode, keys.k_type, [&](auto type) {
      QueryRows::Pack<decltype(type), kRowTiles>(keys.head_dim, Layout::kRows, Layout::kScales, Layout::Queries(keys));
    });
    if (keys.exact.base != nullptr) {
      QueryRows::Pack<StaticKvType<formats::Bf16>, kRowTiles>(keys.head_dim, Layout::kRows, Layout::kScales,
                                                              Layout::ExactQueries(keys));
    }
    SyncBlock();
  }

  static KVANTA_DEVICE void Products(const AttentionParams& keys, const ChunkLocation& location, int lane,
                                     RowFragments<kRowTiles>& s) {
    const CellOffsets& offsets = location.exact ? keys.exact_k : keys.k;
    KeyTypes::Visit(location.exact ? DecodeKind::kBf16 : keys.k_type.decode, keys.k_type, [&](auto type) {
      using KvType = decltype(type);
      using Keys = KeyScores<KvType, kRowTiles, BlocksOf(kMaxLatentRank), false>;
      RowScales<kRowTiles> scales = {};
      ForRows<kRowTiles>([&](int row_tile, int q) {
        const auto query = LoadShared<float>(Layout::kScales + 4 * RowOf(row_tile, q, lane % 4));
        scales.row[row_tile][q] = KvType::kBf16 ? 1.0F : query * keys.k_type.unit;
      });
      const PageCell cell(location.record + offsets.Cell(0), offsets, CodeBytes(type, keys.head_dim), keys.page_size,
                          location.token);
      Keys::Scores(type, cell, keys.head_dim, location.exact ? Layout::ExactQueries(keys) : Layout::Queries(keys), lane,
                   s);
      Keys::Scale(type, cell, scales, lane / 4, s);
    });
  }

  // Adds the heads' weight * max(product, 0) to the scores of a chunk, whose first token is `token`. NaN counts as 0.
  static KVANTA_DEVICE void AddWeighted(const RowFragments<kRowTiles>& s, const RowValues<kRowTiles>& weight, int token,
                                        int tokens, bool first, int lane) {
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float sum = 0;
      ForRows<kRowTiles>([&](int row_tile, int q) {
        const float product = s[row_tile][j / 2][j % 2 * 2 + q];
        sum = MultiplyAdd(weight[row_tile][q], product > 0 ? product : 0.0F, sum);
      });
      sum += ShuffleXor(sum, 1);
      sum += ShuffleXor(sum, 2);
      const int own = lane / 4 * 4 + j;
      if (lane % 4 != j || own >= tokens) continue;
      const int at = Layout::kScores + 4 * (token + own);
      StoreShared(at, first ? sum : LoadShared<float>(at) + sum);
    }
  }
};

}  // namespace kvanta::kernels::cuda
