#include "attention/work_list.h"

#include <algorithm>

#include "base/math.h"

namespace kvanta::attention {
namespace {

// Tasks per thread for load balance. Tiles of prefill chunks have larger split results: fewer tasks.
constexpr int kTasksOfThread = 8;
constexpr int kChunkTasksOfThread = 4;
constexpr int64_t kMinIdle = 16;  // tolerated idle time: 1 / kMinIdle of the total
// Batches of small tasks per thread, for load balance.
constexpr size_t kBatchesOfThread = 64;
constexpr size_t kMaxTasksOfBatch = 16;

// Cost model of a tile: pages it reads, times its query rows plus one for loading the page.
int64_t Cost(const QueryTile& tile, const WorkShape& shape, int page_size) {
  const int64_t seen = tile.last_key + 1 - shape.visibility.First(tile.first);
  return CeilDiv(seen, page_size) * (int64_t{tile.tokens} * shape.Group() + 1) * tile.kv_heads;
}

// True if threads that process whole tiles would finish at about the same time, assuming every tile costs as much as
// the largest. Split-KV needs a second parallel region to combine, which costs more than a little idle time.
bool IsBalanced(int64_t total, int64_t largest, int threads) {
  const int64_t round = largest * threads, rounds = CeilDiv(total, round);
  return threads == 1 || (rounds * round - total) * kMinIdle <= total;
}

// Calls visit(QueryTile) for every query tile of one KV head.
template <class Visit>
void VisitTiles(const WorkShape& shape, const Batch& batch, int page_size, Visit visit) {
  const int tile_tokens = std::max(1, kTileRows / shape.Group());
  const int64_t span = int64_t{kSplitTokens} * shape.classes.of;
  for (size_t s = 0; s < batch.sequences.size(); ++s) {
    const SequenceRows& sequence = batch.sequences[s];
    for (int64_t first = sequence.span.start; first < sequence.End();) {
      const int64_t page_end = (first / page_size + 1) * page_size;
      const int64_t last = std::min({sequence.End(), page_end, first + tile_tokens});
      const int64_t last_key = shape.visibility.Last(last - 1, sequence.End());
      visit(QueryTile{.sequence = static_cast<int>(s),
                      .first = first,
                      .tokens = static_cast<int>(last - first),
                      .last_key = last_key,
                      .first_split = shape.visibility.First(first) / span * shape.classes.Own(),
                      .last_split = (last_key / span + 1) * shape.classes.Own()});
      first = last;
    }
  }
}

// Calls visit(split) for the tile's KV splits that have pages.
template <class Visit>
void VisitSplits(const WorkShape& shape, const QueryTile& tile, int page_size, Visit visit) {
  for (int64_t split = tile.first_split; split < tile.last_split; ++split) {
    const bool is_empty =
        shape.classes.of > 1 &&
        PagesOfSplit(shape.classes, shape.visibility, tile.first, tile.last_key, page_size, split).IsEmpty();
    if (!is_empty) visit(split);
  }
}

void AddTiles(const WorkShape& shape, const Batch& batch, int page_size, int threads, WorkList& list) {
  int64_t splits = 0;
  VisitTiles(shape, batch, page_size, [&](const QueryTile& tile) { splits += tile.last_split - tile.first_split; });
  int max_heads = shape.kv_heads;
  if (threads > 1) {
    const int64_t heads = splits * shape.kv_heads / (int64_t{kTasksOfThread} * threads);
    const int parts = (shape.kv_heads - 1) / static_cast<int>(std::clamp<int64_t>(heads, 1, shape.kv_heads)) + 1;
    max_heads = (shape.kv_heads - 1) / parts + 1;  // parts of similar size
  }
  for (int head = 0; head < shape.kv_heads; ++head) {
    VisitTiles(shape, batch, page_size, [&](QueryTile tile) {
      const int heads = std::clamp(kTileRows / (tile.tokens * shape.Group()), 1, max_heads);
      if (head % heads != 0) return;
      tile.kv_head = head;
      tile.kv_heads = std::min(heads, shape.kv_heads - head);
      list.tiles.push_back(tile);
    });
  }
}

}  // namespace

void MakeWorkList(const WorkShape& shape, const Batch& batch, int page_size, int threads, WorkList& list) {
  list.shape = shape;
  list.tiles.clear();
  list.tasks.clear();
  list.combines.clear();
  list.split_rows = 0;
  AddTiles(shape, batch, page_size, threads, list);

  int64_t total = 0, largest = 1;
  for (const QueryTile& tile : list.tiles) {
    const int64_t cost = Cost(tile, shape, page_size);
    total += cost;
    largest = std::max(largest, cost);
  }
  const bool balanced = IsBalanced(total, largest, threads);
  // Costly tiles first: later tiles of a chunk see more tokens.
  for (size_t i = list.tiles.size(); i-- > 0;) {
    QueryTile& tile = list.tiles[i];
    const int64_t tasks = int64_t{tile.tokens == 1 ? kTasksOfThread : kChunkTasksOfThread} * threads;
    int64_t splits = 0;
    VisitSplits(shape, tile, page_size, [&](int64_t /*split*/) { ++splits; });
    if (splits == 0) continue;  // other ranks have all pages
    const bool spread = !balanced && splits > 1 && Cost(tile, shape, page_size) * tasks > total;
    if (!spread) {
      list.tasks.push_back({static_cast<int32_t>(i), tile.first_split, tile.last_split});
      continue;
    }
    tile.split_slot = list.split_rows;
    list.split_rows += (tile.last_split - tile.first_split) * tile.kv_heads * tile.tokens * shape.Group();
    for (int head = 0; head < tile.kv_heads; ++head) list.combines.push_back({static_cast<int32_t>(i), head});
    VisitSplits(shape, tile, page_size, [&](int64_t split) {
      list.tasks.push_back({static_cast<int32_t>(i), split, split + 1});
    });
  }
  list.task_batch =
      std::clamp<size_t>(list.tasks.size() / (kBatchesOfThread * static_cast<size_t>(threads)), 1, kMaxTasksOfBatch);
}

}  // namespace kvanta::attention
