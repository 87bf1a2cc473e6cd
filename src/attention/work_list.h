// Work partitioning of a step's attention: query tiles (all query heads of some KV heads, tokens of one page) times KV
// splits (Flash-Decoding). A tile's splits are either processed in one task or distributed over tasks and combined
// afterwards. The arithmetic is the same: a split is 1,024 tokens at absolute positions, and splits are combined in
// ascending order. With several classes of pages (page_classes.h), a split has 1,024 tokens of one class. Tiles of few
// tokens cover several KV heads if enough tasks remain: the heads are contiguous in a page, and sequential reads are
// fastest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/batch.h"
#include "attention/page_classes.h"

namespace kvanta::attention {

inline constexpr int kSplitTokens = 1024;
inline constexpr int kTileRows = 64;  // query rows per tile; a single token may have more

// Layer parameters that determine the partitioning; layers of equal shape share a work list.
struct WorkShape {
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;  // of V's cells: channels of a split result
  cache::Visibility visibility = {};
  bool is_latent = false;  // one cell is K and V
  bool is_sparse = false;  // rows that see more tokens than they attend to are left out
  PageClasses classes = {};

  bool operator==(const WorkShape&) const = default;
  int Group() const noexcept { return heads / kv_heads; }
};

inline WorkShape WorkShapeOf(const AttentionSpec& spec, const formats::LayerScheme& scheme) noexcept {
  return {.heads = spec.heads,
          .kv_heads = spec.kv_heads,
          .head_dim = scheme.v.shape.head_dim,
          .visibility = spec.visibility,
          .is_latent = scheme.SharesCell(),
          .is_sparse = spec.index_topk != 0};
}

// Query tile: tokens [first, first + tokens) of a sequence, all in one page, for KV heads [kv_head, kv_head +
// kv_heads). Row order: [KV head][token][query head of the KV head].
struct QueryTile {
  int sequence = 0;
  int kv_head = 0;
  int kv_heads = 1;
  int64_t first = 0;  // position
  int tokens = 0;
  int64_t last_key = 0;     // position of the last key that its last token sees
  int64_t first_split = 0;  // KV splits [first_split, last_split) hold all visible tokens of this rank
  int64_t last_split = 0;
  int64_t split_slot = -1;  // first row of its split results, if distributed; else -1
};

// Pages first, first + step, ... before `end`.
struct SplitPages {
  int64_t first = 0;
  int64_t end = 0;
  int step = 1;

  bool IsEmpty() const noexcept { return first >= end; }
  int64_t Last() const noexcept { return first + (end - 1 - first) / step * step; }
};

// Pages of KV split `split` that a tile of queries from position `first` on, of one page, sees up to position `last`.
// With Own() classes, the splits of the same tokens have consecutive numbers, one for each class.
inline SplitPages PagesOfSplit(const PageClasses& classes, const cache::Visibility& visibility, int64_t first,
                               int64_t last, int page_size, int64_t split) noexcept {
  const int own = classes.Own();
  const int64_t of_class = classes.first + split % own * classes.step;
  const int64_t span = int64_t{kSplitTokens / page_size} * classes.of;
  const int64_t begin = split / own * span + of_class;
  const int64_t visible = visibility.First(first) / page_size;
  const int64_t skipped = std::max<int64_t>(0, visible - begin + classes.of - 1) / classes.of;
  return {
      .first = begin + skipped * classes.of, .end = std::min(begin + span, last / page_size + 1), .step = classes.of};
}

// KV splits [first_split, last_split) of a query tile.
struct SplitTask {
  int32_t tile = 0;
  int64_t first_split = 0;
  int64_t last_split = 0;
};

// Combination of the split results of a tile's KV head.
struct CombineTask {
  int32_t tile = 0;
  int32_t head = 0;  // index within the tile
};

struct WorkList {
  WorkShape shape;
  std::vector<QueryTile> tiles;
  std::vector<SplitTask> tasks;  // most expensive first
  size_t task_batch = 1;         // tasks that a thread takes at a time, so that it can prefetch for the next
  std::vector<CombineTask> combines;
  int64_t split_rows = 0;  // total rows of split results

  int64_t Batches() const noexcept { return static_cast<int64_t>((tasks.size() + task_batch - 1) / task_batch); }
  // Range of tasks [first, second) of a batch.
  std::pair<size_t, size_t> BatchOf(int64_t index) const noexcept {
    const size_t begin = static_cast<size_t>(index) * task_batch;
    return {begin, std::min(begin + task_batch, tasks.size())};
  }
};

// Fills `list`, reusing its memory. Distributes a tile's splits over tasks if whole tiles are unbalanced and this tile
// is large enough to leave other threads idle.
void MakeWorkList(const WorkShape& shape, const Batch& batch, int page_size, int threads, WorkList& list);

}  // namespace kvanta::attention
