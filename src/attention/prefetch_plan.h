// What a task reads and where its rows are, and what kernels touch of it ahead of their turn, so that memory never
// rests.
#pragma once

#include <cstdint>

#include "attention/layer_view.h"
#include "attention/work_list.h"
#include "cache/block_table.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// Where the rows of a tile's first token are: f32 q [tokens][heads * KeyDim()], rows `q_stride` floats apart, and out
// [tokens][heads * head_dim].
struct TileRows {
  const float* q = nullptr;
  int64_t q_stride = 0;
  float* out = nullptr;
};

// A page of a KV head of a tile.
struct HeadPage {
  int64_t page = 0;
  int head = 0;  // of the tile's, from 0
};

// What the kernels touch while they attend a page of a head: the rest of the page and the start of the next one. No
// more than that: the first-level cache has no room for a whole page beside the current one.
struct Ahead {
  kernels::Prefetch qk, softmax, pv;
};

// Runs [first_split, last_split) of a tile: page by page, and of each page head by head, for so they lie in memory.
class PrefetchPlan {
 public:
  PrefetchPlan(const LayerView& layer, const Tile& tile, int64_t first_split, int64_t last_split,
               const cache::PageRef* pages, TileRows rows) noexcept;

  int64_t own_page() const noexcept { return own_page_; }
  int64_t first_page() const noexcept { return first_page_; }
  int64_t last_page() const noexcept { return last_page_; }  // behind the last one
  PageView View(HeadPage at) const noexcept {
    return layer_.View(own_page_, at.page, pages_[at.page], tile_.kv_head + at.head);
  }
  // The row of a token, both from the tile's first on, and of a query head of a KV head.
  const float* QueryOf(int head, int token, int of_head) const noexcept;
  float* ResultOf(int head, int token, int of_head) const noexcept;

  // `next` is what the same thread reads afterwards.
  void SetNext(PrefetchPlan& next) noexcept;
  // Touches the start of the first page, unless the task before did.
  void PrefetchFirst() const noexcept;
  Ahead PrefetchOf(HeadPage at) const noexcept;

 private:
  struct Span {
    const uint8_t* begin = nullptr;
    int64_t bytes = 0;
  };
  // What is read of a page of a head: `start` and `with` are touched before its turn, `rest` while it is scored.
  struct Spans {
    Span start = {}, with = {}, rest = {};
  };
  Spans PrefetchRanges(HeadPage at) const noexcept;
  Spans NextPrefetchRanges(HeadPage at) const noexcept;  // of what is read next
  kernels::Prefetch RowsOf(int head) const noexcept;

  const LayerView& layer_;
  const Tile& tile_;
  const cache::PageRef* pages_;
  TileRows rows_;
  int page_size_;
  int64_t own_page_;
  int64_t first_page_;
  int64_t last_page_;
  const PrefetchPlan* next_ = nullptr;
  bool touched_ = false;
};

}  // namespace kvanta::attention
