// How a step's attention is cut into pieces: tiles of query rows (all query heads of some KV heads, tokens of one
// page), each either attended run by run in one task, or with its runs spread over tasks and merged afterwards. The
// arithmetic is the same both ways: a run is 1,024 tokens at absolute positions, runs are merged in ascending order.
// Few tokens take all KV heads together where that leaves enough tasks: these lie side by side in a page, and memory is
// read fastest in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/batch.h"

namespace kvanta::attention {

inline constexpr int kSplitTokens = 1024;
inline constexpr int kTileRows = 64;  // query rows of a tile, unless one token has more

// Layers that cut a step in the same way share a work list.
struct WorkShape {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  cache::Visibility visibility = {};

  bool operator==(const WorkShape&) const = default;
  int Group() const noexcept { return heads / kv_heads; }
};

// Query tokens [first, first + tokens) of a sequence, all in one page, for KV heads [kv_head, kv_head + kv_heads). Rows
// are in the order [KV head][token][query head of the KV head].
struct Tile {
  int sequence = 0;
  int kv_head = 0;
  int kv_heads = 1;
  int64_t first = 0;  // position
  int tokens = 0;
  int64_t first_split = 0;  // runs [first_split, last_split) hold what its rows see
  int64_t last_split = 0;
  int64_t partial = -1;  // of its first run, where runs are spread over tasks: slots of rows(tile) rows per run
};

// A task: runs [first_split, last_split) of a tile.
struct SplitTask {
  int32_t tile = 0;
  int64_t first_split = 0;
  int64_t last_split = 0;
};

// A KV head of a tile whose runs are spread.
struct CombineTask {
  int32_t tile = 0;
  int32_t head = 0;  // of the tile's, from 0
};

struct WorkList {
  WorkShape shape;
  std::vector<Tile> tiles;
  std::vector<SplitTask> tasks;  // costly ones first
  size_t task_batch = 1;         // tasks that a thread takes at a time, so that it knows what it reads next
  std::vector<CombineTask> combines;
  int64_t split_rows = 0;  // rows of partial results that they need

  int64_t Batches() const noexcept { return static_cast<int64_t>((tasks.size() + task_batch - 1) / task_batch); }
  // Tasks [first, second).
  std::pair<size_t, size_t> BatchOf(int64_t index) const noexcept {
    const size_t begin = static_cast<size_t>(index) * task_batch;
    return {begin, std::min(begin + task_batch, tasks.size())};
  }
};

// Fills `list`, reusing its memory. A tile's runs are spread when leaving it whole could keep the other threads idle,
// and tiles do not come out even as they are.
void MakeWorkList(const WorkShape& shape, const Batch& batch, int page_size, int threads, WorkList& list);

}  // namespace kvanta::attention
