// Chunks of 32 tokens (of 16 where a page has no more) as a tile of query rows sees them: which of their tokens, and
// in which record of their page. A unit that includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/launch.h"

namespace kvanta::kernels::cuda {

// A chunk as a tile sees it.
struct ChunkView {
  int token[2];  // which of the tile's rows g and g + 8 are of
  int begin[2];  // tokens of the chunk that rows g and g + 8 see: [begin, end)
  int end[2];
  int first = 0;  // what some row sees
  int last = 0;
  bool whole = false;  // all rows see all of it
};

// Slots of the chunk at `position` that a query at `query` sees.
KVANTA_DEVICE void VisibleRange(const AttentionParams& layer, int query, int position, int& begin, int& end) {
  const int tokens = layer.page_size < kChunkTokens ? layer.page_size : kChunkTokens;
  const int first = layer.sliding_window > 0 ? query - layer.sliding_window + 1 - position : 0;
  const int last = query + 1 - position;
  begin = first < 0 ? 0 : first > tokens ? tokens : first;
  end = last < 0 ? 0 : last > tokens ? tokens : last;
}

// tokens: of rows g and g + 8, which of the tile's; the tile's number for rows that it lacks.
KVANTA_DEVICE ChunkView ViewOf(const AttentionParams& layer, const QueryTile& tile, int position,
                               const int (&tokens)[2]) {
  ChunkView chunk;
  int first_end = 0;  // of the first token, whose begin is the least
  int last_begin = 0;
  VisibleRange(layer, tile.first, position, chunk.first, first_end);
  VisibleRange(layer, tile.first + tile.tokens - 1, position, last_begin, chunk.last);
  const int all = layer.page_size < kChunkTokens ? layer.page_size : kChunkTokens;
  chunk.whole = chunk.first == 0 && first_end == all && last_begin == 0 && chunk.last == all;
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    chunk.token[row] = tokens[row];
    chunk.begin[row] = chunk.end[row] = 0;
    if (tokens[row] < tile.tokens) {
      VisibleRange(layer, tile.first + tokens[row], position, chunk.begin[row], chunk.end[row]);
    }
  }
  return chunk;
}

// Where a chunk lies.
struct Location {
  const uint8_t* record;
  int slot;
  bool exact;
};

// Pages from `first` on, whose ids lie in shared memory.
struct PageWindow {
  int ids;
  int first;

  // Of pages that have a token before `end`, by the threads from 0 to `count`.
  KVANTA_DEVICE void Load(const AttentionParams& layer, const QueryTile& tile, int end, int thread, int count) const {
    if (thread >= count || ((first + thread) << layer.page_shift) >= end) return;
    const PageIds page = layer.step->pages[tile.pages + first + thread];
    StoreShared(ids + 8 * thread, Vec2{{static_cast<uint32_t>(page.quantized), static_cast<uint32_t>(page.exact)}});
  }

  // The page rule.
  KVANTA_DEVICE Location LookUpPage(const AttentionParams& layer, const QueryTile& tile, int position) const {
    const int page = position >> layer.page_shift;
    const auto words = LoadShared<Vec2>(ids + 8 * (page - first));
    Location at;
    at.exact = page > (tile.first >> layer.page_shift) - layer.exact_pages || page < layer.exact_sinks;
    at.slot = position & (layer.page_size - 1);
    const Records& records = at.exact ? layer.exact : layer.quantized;
    at.record = records.base + static_cast<int32_t>(at.exact ? words.word[1] : words.word[0]) * records.bytes;
    return at;
  }
};

}  // namespace kvanta::kernels::cuda
