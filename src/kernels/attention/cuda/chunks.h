// Chunks of 32 tokens (16 in pages of 16 tokens): which tokens the rows of a query tile see, and which record of the
// page they are read from. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// A chunk as seen by a tile. By row of a lane: [row tile][2] (row_state.h).
template <int kRowTiles>
struct ChunkView {
  int token[kRowTiles][2];  // the tile's token of the row
  int begin[kRowTiles][2];  // the row sees tokens [begin, end) of the chunk
  int end[kRowTiles][2];
  int visible_begin = 0;  // some row sees tokens [visible_begin, visible_end)
  int visible_end = 0;
  bool fully_visible = false;  // every row sees every token
};

KVANTA_DEVICE int ChunkTokens(const AttentionParams& params) {
  return params.page_size < kChunkTokens ? params.page_size : kChunkTokens;
}

// First position begin + i * step whose `step` tokens some row of the tile may see.
KVANTA_DEVICE int FirstVisibleStep(const AttentionParams& params, const QueryTile& tile, int begin, int step) {
  const int hidden = params.visibility.First(tile.first_position) - begin;
  return begin + (hidden > 0 ? hidden / step * step : 0);
}

// Tokens that the chunk at `position` has. kGathered: pages may be copies of chosen tokens.
template <bool kGathered>
KVANTA_DEVICE int TokensOfChunk(const AttentionParams& params, const QueryTile& tile, int position) {
  const int tokens = ChunkTokens(params);
  if (!kGathered || params.gathered == nullptr) return tokens;
  const int page = position >> params.page_shift;
  const int left = params.gathered[tile.gathered].TokensOf(page) - (position & (params.page_size - 1));
  return left < 0 ? 0 : left < tokens ? left : tokens;
}

// One past the last position that some row of the tile sees; at most `limit`.
KVANTA_DEVICE int VisibleEnd(const AttentionParams& params, const QueryTile& tile, int limit) {
  const int end = params.visibility.Last(tile.first_position + tile.tokens - 1, tile.sequence_tokens) + 1;
  return end < limit ? end : limit;
}

// Tokens [begin, end) of the chunk at `position`, which has `tokens`, that the tile's query token `index` sees.
KVANTA_DEVICE void VisibleRange(const AttentionParams& params, const QueryTile& tile, int index, int position,
                                int tokens, int& begin, int& end) {
  const int query = tile.first_position + index;
  const int first = params.visibility.First(query) - position;
  const int last = params.visibility.Last(query, tile.sequence_tokens) + 1 - position;
  begin = first < 0 ? 0 : first > tokens ? tokens : first;
  end = last < 0 ? 0 : last > tokens ? tokens : last;
}

// Positions of the chunks whose tokens are visible to every row of a tile: [first, last].
struct FullyVisible {
  int first, last;

  KVANTA_DEVICE FullyVisible(const AttentionParams& params, const QueryTile& tile)
      : first(params.visibility.First(tile.first_position + tile.tokens - 1)),
        last(params.visibility.Last(tile.first_position, tile.sequence_tokens) + 1 - ChunkTokens(params)) {}
  KVANTA_DEVICE bool Contains(int position) const { return position >= first && position <= last; }
};

// token_of(row tile, q): the tile's token of a lane's row; one that it does not have: no row.
template <int kRowTiles, bool kGathered, class TokenOf>
KVANTA_DEVICE ChunkView<kRowTiles> MakeChunkView(const AttentionParams& params, const QueryTile& tile, int position,
                                                 TokenOf token_of) {
  ChunkView<kRowTiles> chunk;
  // Both ends of the visible range do not decrease with the query's position.
  int first_end = 0;
  int last_begin = 0;
  const int tokens = TokensOfChunk<kGathered>(params, tile, position);
  VisibleRange(params, tile, 0, position, tokens, chunk.visible_begin, first_end);
  VisibleRange(params, tile, tile.tokens - 1, position, tokens, last_begin, chunk.visible_end);
  chunk.fully_visible = FullyVisible(params, tile).Contains(position) && (!kGathered || tokens == ChunkTokens(params));
  ForRows<kRowTiles>([&](int row_tile, int q) {
    const int token = token_of(row_tile, q);
    chunk.token[row_tile][q] = token;
    int& begin = chunk.begin[row_tile][q];
    int& end = chunk.end[row_tile][q];
    begin = end = 0;
    if (token >= 0 && token < tile.tokens) VisibleRange(params, tile, token, position, tokens, begin, end);
  });
  return chunk;
}

// A chunk's record, and its first token's index in the page.
struct ChunkLocation {
  const uint8_t* record;
  int token;
  bool exact;
};

// A sequence's page ids from page `first_page` on, in shared memory at `offset`. A tile reads `quantized` pages from
// their quantized record, and all others from their exact one.
struct SharedPageTable {
  int offset;
  int first_page;
  cache::PageRange<int> quantized;

  KVANTA_DEVICE SharedPageTable(const AttentionParams& params, const QueryTile& tile, int in_shared, int first)
      : offset(in_shared),
        first_page(first),
        quantized(params.exact_pages.Quantized(tile.first_position >> params.page_shift)) {
    if (params.visibility.both_directions && params.exact_pages.open == 0) {  // pages after the tile's own, too
      quantized.end = ((VisibleEnd(params, tile, tile.sequence_tokens) - 1) >> params.page_shift) + 1;
    }
  }
  // The table of a tile whose pages may be copies of chosen tokens.
  static KVANTA_DEVICE SharedPageTable Gathered(const AttentionParams& params, const QueryTile& tile, int in_shared,
                                                int first) {
    SharedPageTable table(params, tile, in_shared, first);
    if (params.gathered != nullptr) {
      const cache::GatheredPages& pages = params.gathered[tile.gathered];
      table.quantized = {pages.ends[0], pages.ends[1]};
    }
    return table;
  }

  // Loads pages that have a token before `end`, by threads [0, count).
  KVANTA_DEVICE void Load(const AttentionParams& params, const QueryTile& tile, int end, int thread, int count) const {
    if (thread >= count || ((first_page + thread) << params.page_shift) >= end) return;
    const PageIds page = params.metadata->pages[tile.page_table + first_page + thread];
    StoreShared(offset + 8 * thread, Vec2{{static_cast<uint32_t>(page.quantized), static_cast<uint32_t>(page.exact)}});
  }

  KVANTA_DEVICE int32_t QuantizedPage(const AttentionParams& params, int position) const {
    return LoadShared<int32_t>(offset + 8 * ((position >> params.page_shift) - first_page));
  }
  KVANTA_DEVICE ChunkLocation LookUpPage(const AttentionParams& params, int position) const {
    const int page = position >> params.page_shift;
    ChunkLocation chunk;
    chunk.exact = !quantized.Contains(page);
    chunk.token = position & (params.page_size - 1);
    const PagePool& pool = chunk.exact ? params.exact : params.quantized;
    chunk.record = pool.Record(LoadShared<int32_t>(offset + 8 * (page - first_page) + (chunk.exact ? 4 : 0)));
    return chunk;
  }
};

}  // namespace kvanta::kernels::cuda
