// Memory access of a split task: its pages in the order they are read, its query and output rows, and the ranges that
// kernels prefetch to keep the memory busy.
#pragma once

#include <cstdint>

#include "attention/layer_view.h"
#include "attention/work_list.h"
#include "cache/block_table.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// Query and output rows, starting at a query tile's first token: f32 q [tokens][heads * KeyDim()] with row stride
// `q_stride` floats, out [tokens][heads * head_dim].
struct QueryRows {
  const float* q = nullptr;
  int64_t q_stride = 0;
  float* out = nullptr;
};

// A page and a KV head of a query tile.
struct HeadPage {
  int64_t page = 0;
  int head = 0;  // index within the tile
};

// Prefetch ranges of the three stages that process a page of a head: of this page and of the next one.
struct PrefetchStages {
  kernels::Prefetch qk, softmax, pv;
};

// KV splits [first_split, last_split) of a query tile, read page by page and, within a page, head by head: the order in
// memory.
class PrefetchPlan {
 public:
  // two_part_bytes: AttentionKernels::two_part_prefetch_bytes.
  PrefetchPlan(const LayerView& layer, const QueryTile& tile, int64_t first_split, int64_t last_split,
               const cache::PageRef* pages, QueryRows rows, int64_t two_part_bytes) noexcept;

  int64_t own_page() const noexcept { return own_page_; }
  int64_t first_page() const noexcept { return first_page_; }
  int64_t last_page() const noexcept { return last_page_; }  // exclusive
  PageView View(HeadPage at) const noexcept {
    return layer_.View(own_page_, at.page, pages_[at.page], tile_.kv_head + at.head);
  }
  // Row of a query head: `token` and `head` are indices within the tile, `of_head` within the KV head's query heads.
  const float* QueryOf(int head, int token, int of_head) const noexcept;
  float* ResultOf(int head, int token, int of_head) const noexcept;

  // Sets the task that the same thread processes next.
  void SetNext(PrefetchPlan& next) noexcept;
  // Prefetches the start of the first page, unless the previous task already did.
  void PrefetchFirst() const noexcept;
  PrefetchStages PrefetchOf(HeadPage at) const noexcept;

 private:
  struct Span {
    const uint8_t* begin = nullptr;
    int64_t bytes = 0;
  };
  // Ranges of a page of a head: `start` and `with` are prefetched during the previous page, `rest` during QK.
  struct Spans {
    Span start = {}, with = {}, rest = {};
  };
  Spans PrefetchRanges(HeadPage at) const noexcept;
  Spans NextPrefetchRanges(HeadPage at) const noexcept;  // ranges of the page and head read after `at`
  kernels::Prefetch RowsOf(int head) const noexcept;

  const LayerView& layer_;
  const QueryTile& tile_;
  int64_t two_part_bytes_;
  const cache::PageRef* pages_;
  QueryRows rows_;
  int page_size_;
  int64_t own_page_;
  int64_t first_page_;
  int64_t last_page_;
  const PrefetchPlan* next_ = nullptr;
  bool start_prefetched_ = false;
};

}  // namespace kvanta::attention
