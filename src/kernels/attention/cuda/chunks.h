// Chunks of 32 tokens (16 in pages of 16 tokens): which tokens the rows of a query tile see, and which record of the
// page they are read from. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

// A chunk as seen by a tile.
struct ChunkView {
  int token[2];  // the tile's token of rows g and g + 8
  int begin[2];  // rows g and g + 8 see tokens [begin, end) of the chunk
  int end[2];
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

// Tokens [begin, end) of the chunk at `position` that a query at `query` sees.
KVANTA_DEVICE void VisibleRange(const AttentionParams& params, int query, int position, int& begin, int& end) {
  const int tokens = ChunkTokens(params);
  const int first = params.visibility.First(query) - position;
  const int last = query + 1 - position;
  begin = first < 0 ? 0 : first > tokens ? tokens : first;
  end = last < 0 ? 0 : last > tokens ? tokens : last;
}

// tokens: the tile's token of rows g and g + 8, at least tile.tokens for rows beyond the tile.
KVANTA_DEVICE ChunkView MakeChunkView(const AttentionParams& params, const QueryTile& tile, int position,
                                      const int (&tokens)[2]) {
  ChunkView chunk;
  // Both ends of the visible range do not decrease with the query's position.
  int first_end = 0;
  int last_begin = 0;
  VisibleRange(params, tile.first_position, position, chunk.visible_begin, first_end);
  VisibleRange(params, tile.first_position + tile.tokens - 1, position, last_begin, chunk.visible_end);
  const int all = ChunkTokens(params);
  chunk.fully_visible = first_end == all && last_begin == 0;
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    chunk.token[row] = tokens[row];
    chunk.begin[row] = chunk.end[row] = 0;
    if (tokens[row] < tile.tokens) {
      VisibleRange(params, tile.first_position + tokens[row], position, chunk.begin[row], chunk.end[row]);
    }
  }
  return chunk;
}

// A chunk's record, and its first token's index in the page.
struct ChunkLocation {
  const uint8_t* record;
  int token;
  bool exact;
};

// A sequence's page ids from page `first_page` on, in shared memory at `offset`.
struct SharedPageTable {
  int offset;
  int first_page;

  // Loads pages that have a token before `end`, by threads [0, count).
  KVANTA_DEVICE void Load(const AttentionParams& params, const QueryTile& tile, int end, int thread, int count) const {
    if (thread >= count || ((first_page + thread) << params.page_shift) >= end) return;
    const PageIds page = params.metadata->pages[tile.page_table + first_page + thread];
    StoreShared(offset + 8 * thread, Vec2{{static_cast<uint32_t>(page.quantized), static_cast<uint32_t>(page.exact)}});
  }

  KVANTA_DEVICE ChunkLocation LookUpPage(const AttentionParams& params, const QueryTile& tile, int position) const {
    const int page = position >> params.page_shift;
    const auto ids = LoadShared<Vec2>(offset + 8 * (page - first_page));
    ChunkLocation chunk;
    chunk.exact = params.exact_pages.Reads(tile.first_position >> params.page_shift, page);
    chunk.token = position & (params.page_size - 1);
    const PagePool& pool = chunk.exact ? params.exact : params.quantized;
    chunk.record = pool.Record(static_cast<int32_t>(chunk.exact ? ids.word[1] : ids.word[0]));
    return chunk;
  }
};

}  // namespace kvanta::kernels::cuda
