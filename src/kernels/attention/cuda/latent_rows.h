// Rows of latent attention (latent_attention.h) in a block's shared memory: queries as operands, positions, softmax
// states. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/queries.h"

namespace kvanta::kernels::cuda {

// Query terms for keys of a decode kind (KvTypeTraits::kTerms).
constexpr KVANTA_DEVICE int QueryTerms(DecodeKind decode) {
  return decode == DecodeKind::kF32 ? 3 : decode == DecodeKind::kBf16 ? 2 : 1;
}

template <class Kernel>
struct LatentRows {
  using KvTypes = typename Kernel::KvTypes;
  using RotatedTypes = typename Kernel::RotatedTypes;
  static constexpr int kTiles = Kernel::kTiles;
  static constexpr int kParts = Kernel::kParts;
  static constexpr int kPartTiles = kTiles / kParts;
  static constexpr int kTileRowTiles = kQueryRows / kRowsPerMma;
  static constexpr int kRowTiles = kPartTiles * kTileRowTiles;  // of a warp
  static constexpr int kPartRows = kPartTiles * kQueryRows;
  static constexpr int kRows = kTiles * kQueryRows;
  static constexpr int kWarps = kParts * kAttendWarps;
  static constexpr int kThreads = kWarps * kWarp;

  static constexpr KVANTA_DEVICE int Rank(const AttentionParams& params) {
    return Kernel::kRank != 0 ? Kernel::kRank : params.head_dim;
  }
  static constexpr KVANTA_DEVICE int Rotated(const AttentionParams& params) {
    return Kernel::kRotated != 0 ? Kernel::kRotated : params.unquantized_dim;
  }

  // A warp and its tiles' query tokens.
  struct Warp {
    QueryTile tokens;
    int lane;
    int index;  // of its chunk among four, and of its channels
    int part;   // of the rows

    // The tiles' row of the lane's (row tile, q).
    KVANTA_DEVICE int Row(int row_tile, int q) const { return part * kPartRows + RowOf(row_tile, q, lane % 4); }
  };

  // The block's shared memory; probabilities overwrite the query rows, which are one tile's at a time.
  struct Layout {
    static constexpr int kScales = 0;
    static constexpr int kPositions = kScales + 4 * kRows;   // of the rows' tokens, -1: no row
    static constexpr int kResults = kPositions + 4 * kRows;  // rows of split results, from the first tile's on
    static constexpr int kOffsets = kResults + 4 * kRows;    // of QueryRowAddresses
    static constexpr int kBias = kOffsets + (kParts > 1 ? 8 * kRows : 0);
    static constexpr int kSums = kBias + 4 * kQueryRows;
    static constexpr int kRowMax = kSums + 4 * kQueryRows;  // row maxima of each warp's chunk
    static constexpr int kWarpSums = kRowMax + kAttendWarps * 4 * kRows;
    static constexpr int kPages = kWarpSums + kAttendWarps * 4 * kRows;
    static constexpr int kSplitPages = kSplitTokens / kMinPage;  // maximum
    static constexpr int kStates = kPages + kSplitPages * 8;     // of the threads' rows
    static constexpr int kStage = kStates + 3 * 2 * kRowTiles * 4 * kThreads;
    static constexpr int kProbBytes = 2 * kRowTiles * 16 * kWarp;  // of a part's rows and a chunk

    // A value of the thread's rows of two row tiles from `row_tile` on.
    static KVANTA_DEVICE int StateAt(int row_tile, int value) {
      return kStates + ((row_tile / 2 * 3 + value) * kThreads + ThreadIndex()) * 16;
    }
    static constexpr KVANTA_DEVICE int Probs(int part, int chunk) {
      return kStage + (part * kAttendWarps + chunk) * kProbBytes;
    }
    // Exact queries are in shared memory if there is one part. Unquantized formats have no exact pages.
    static constexpr KVANTA_DEVICE bool HasExactQueries(const AttentionParams& params) {
      return kParts == 1 && params.exact.base != nullptr;
    }
    static constexpr KVANTA_DEVICE int QueryBytesOfPart(const AttentionParams& params) {
      return QueryBytes(QueryTerms(params.k_type.decode), kRowTiles, Rank(params));
    }
    static constexpr KVANTA_DEVICE int RotatedQueryBytes(const AttentionParams& params) {
      return QueryBytes(QueryTerms(params.unquantized_decode), kRowTiles, Rotated(params));
    }
    static constexpr KVANTA_DEVICE int Queries(const AttentionParams& params, int part) {
      const int rows = kQueryRows * (QueryRows::RowBytes(Rank(params)) + QueryRows::RowBytes(Rotated(params)));
      const int probs = kWarps * kProbBytes;
      return kStage + (rows > probs ? rows : probs) + part * QueryBytesOfPart(params);
    }
    static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& params) { return Queries(params, kParts); }
    static constexpr KVANTA_DEVICE int RotatedQueries(const AttentionParams& params, int part) {
      return ExactQueries(params) + (HasExactQueries(params) ? QueryBytes(2, kRowTiles, Rank(params)) : 0) +
             part * RotatedQueryBytes(params);
    }
  };

  // Loads the queries of tile `index` of `count`; those of the block beyond have no rows.
  static KVANTA_DEVICE void LoadQueries(const AttentionParams& params, const QueryTile* tiles, int count, int index) {
    const int rank = Rank(params);
    QueryTile tile = tiles[kTiles == 1 || index < count ? index : 0];
    if (kTiles > 1 && index >= count) tile.tokens = 0;
    const int first_row = index * kQueryRows;
    const int scales = Layout::kScales + 4 * first_row;
    const int rotated_rows = Layout::kStage + kQueryRows * QueryRows::RowBytes(rank);
    QueryRows::Load<kTileRowTiles, true>(params, tile, rank, Layout::kStage, scales, Layout::kBias, Layout::kSums,
                                         rotated_rows, kWarps);
    if (const int row = ThreadIndex(); row < kQueryRows) {
      const bool exists = row < tile.tokens * tile.heads;
      const int token = row / tile.heads;
      StoreShared(Layout::kPositions + 4 * (first_row + row), exists ? tile.first_position + token : -1);
      StoreShared(Layout::kResults + 4 * (first_row + row), tile.result_row - tiles[0].result_row + row);
      if constexpr (kParts > 1) {
        const int64_t head = tile.first_head + row % tile.heads;
        StoreShared(Layout::kOffsets + 8 * (first_row + row),
                    exists ? (tile.row + token) * params.q_stride + head * params.key_dim : int64_t{-1});
      }
    }
    SyncBlock();
    const int part = kParts == 1 ? 0 : index / kPartTiles;
    const auto pack = [&](auto type, int head_dim, int rows, int to) {
      QueryRows::Pack<decltype(type), kTileRowTiles, false, kRowTiles>(head_dim, rows, scales, to,
                                                                       index % kPartTiles * kTileRowTiles, kWarps);
    };
    KvTypes::Visit(params.k_type.decode, params.k_type,
                   [&](auto type) { pack(type, rank, Layout::kStage, Layout::Queries(params, part)); });
    if (Layout::HasExactQueries(params)) {
      pack(StaticKvType<formats::Bf16>(params.k_type), rank, Layout::kStage, Layout::ExactQueries(params));
    }
    RotatedTypes::Visit(params.unquantized_decode, params.k_type, [&](auto type) {
      pack(type, Rotated(params), rotated_rows, Layout::RotatedQueries(params, part));
    });
  }

  // The softmax state is in shared memory while scores or values are computed.
  static KVANTA_DEVICE void SaveState(const RowState<kRowTiles>& state) {
    KVANTA_UNROLL
    for (int tile = 0; tile < kRowTiles; tile += 2) {
      const auto save = [&](int value, auto word) {
        StoreShared(Layout::StateAt(tile, value),
                    Vec4{{word(tile, 0), word(tile, 1), word(tile + 1, 0), word(tile + 1, 1)}});
      };
      save(0, [&](int t, int q) { return std::bit_cast<uint32_t>(state.max[t][q]); });
      save(1, [&](int t, int q) { return std::bit_cast<uint32_t>(state.sum[t][q]); });
      save(2, [&](int t, int q) { return static_cast<uint32_t>(state.exponent[t][q]); });
    }
  }
  static KVANTA_DEVICE void LoadState(RowState<kRowTiles>& state) {
    KVANTA_UNROLL
    for (int tile = 0; tile < kRowTiles; tile += 2) {
      const auto load = [&](int value, auto set) {
        const auto words = LoadShared<Vec4>(Layout::StateAt(tile, value));
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) set(tile + i / 2, i % 2, words.word[i]);
      };
      load(0, [&](int t, int q, uint32_t word) { state.max[t][q] = std::bit_cast<float>(word); });
      load(1, [&](int t, int q, uint32_t word) { state.sum[t][q] = std::bit_cast<float>(word); });
      load(2, [&](int t, int q, uint32_t word) { state.exponent[t][q] = static_cast<int>(word); });
    }
  }

  // The chunk as the warp's rows see it.
  static KVANTA_DEVICE ChunkView<kRowTiles> View(const AttentionParams& params, const Warp& warp, int position) {
    return MakeChunkView<kRowTiles, true>(params, warp.tokens, position, [&](int row_tile, int q) {
      return LoadShared<int>(Layout::kPositions + 4 * warp.Row(row_tile, q)) - warp.tokens.first_position;
    });
  }
};

}  // namespace kvanta::kernels::cuda
