// Memory access of a split task: its pages in the order they are read, its query and output rows, and the ranges that
// kernels prefetch to keep the memory busy.
#pragma once

#include <cstdint>
#include <iterator>

#include "attention/layer_view.h"
#include "attention/partial_results.h"
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
  // With context parallelism, instead of `out`: results of this rank's pages, and the first token's row in them.
  const PartialResults* partial = nullptr;
  int64_t partial_row = 0;
};

// KV splits [first_split, last_split) of a query tile, read class by class in the order of their tree, page by page
// and, within a page, head by head: the order in memory. Ranges are computed once per tile, pages looked up once each,
// two pages ahead: the time between a page's kernels is time in which nothing is prefetched.
class PrefetchPlan {
 public:
  // two_part_bytes: AttentionKernels::two_part_prefetch_bytes.
  PrefetchPlan(const LayerView& layer, const QueryTile& tile, int64_t first_split, int64_t last_split,
               const cache::PageRef* pages, QueryRows rows, int64_t two_part_bytes) noexcept;

  // The record that the tile reads of a page.
  cache::PageKind Kind(int64_t page) const noexcept { return layer_.Kind(own_page_, page, pages_[page]); }
  SplitPages PagesOf(int64_t split) const noexcept {
    return PagesOfSplit(layer_.classes, layer_.attention->visibility, tile_.first, tile_.last_key, page_size_, split);
  }
  // Calls visit(split) for the splits that have pages, in the order they are read.
  template <class Visit>
  void VisitSplits(Visit visit) const noexcept {
    for (int64_t split = NextSplit(-1); split < last_split_; split = NextSplit(split)) visit(split);
  }
  const QueryRows& rows() const noexcept { return rows_; }
  // Row of a query head: `token` and `head` are indices within the tile, `of_head` within the KV head's query heads.
  const float* QueryOf(int head, int token, int of_head) const noexcept;
  float* ResultOf(int head, int token, int of_head) const noexcept;

  // Sets the task that the same thread processes next.
  void SetNext(PrefetchPlan& next) noexcept;
  // Begins at the first page. Prefetches its start, unless the previous task already did.
  void Begin() noexcept;
  // The page being read.
  const PageView& Current() const noexcept { return current_.view; }
  // Sets the memory that the kernels prefetch while they process the page being read, which is `page`.
  void SetPrefetches(int64_t page, kernels::Prefetch& qk, kernels::Prefetch& softmax,
                     kernels::Prefetch& pv) const noexcept;
  // Moves on to the next page.
  void Advance() noexcept;

 private:
  // Bytes of a KV head's cells, counted from the keys: [0, start) and [with_offset, with_offset + with) are prefetched
  // during the page read before, [start, start + rest) during the page's own QK.
  struct Ranges {
    int64_t start = 0;
    int64_t with_offset = 0;
    int64_t with = 0;
    int64_t rest = 0;
  };
  static const Ranges kNoRanges;
  struct Page {
    PageView view = {};
    const uint8_t* keys = nullptr;
    const Ranges* ranges = &kNoRanges;
  };

  // The split read after `split`, or first; last_split_ or more: none.
  int64_t NextSplit(int64_t split) const noexcept;
  Ranges RangesOf(const PageCells& cells, int64_t seen) const noexcept;
  Page FirstHeadOf(int64_t page) const noexcept;
  void AdvanceLater() noexcept;
  void BeginSplit(int64_t split) noexcept;
  template <int kLocality>
  static void PrefetchStart(const Page& page) noexcept;
  kernels::Prefetch RowsOf(int head) const noexcept;

  const LayerView& layer_;
  const QueryTile& tile_;
  int64_t two_part_bytes_;
  const cache::PageRef* pages_;
  QueryRows rows_;
  int page_size_;
  int64_t own_page_;
  int64_t first_split_, last_split_;
  int64_t final_page_ = -1;  // the last one read
  Ranges whole_[std::size(cache::kPageKinds)];
  Ranges own_;  // ranges of own_page_
  const PrefetchPlan* next_ = nullptr;
  bool start_prefetched_ = false;
  // The page being read and the two read after it.
  Page current_, after_, later_;
  const PrefetchPlan* later_plan_ = nullptr;  // plan of later_: this task, the next one or, if null, none
  int64_t later_split_ = 0;
  int64_t later_page_ = 0;
  int64_t later_end_ = 0;  // of the pages of later_split_
};

}  // namespace kvanta::attention
