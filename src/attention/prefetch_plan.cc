#include "attention/prefetch_plan.h"

#include <algorithm>

#include "base/math.h"
#include "kernels/cpu/inline.h"

namespace kvanta::attention {
namespace {

using kernels::Prefetch;

constexpr int64_t kLine = 64;
constexpr int64_t kSoftmaxLines = 16;             // per stream; limit of what softmax can prefetch in its time
constexpr int64_t kValuePrefetchBytes = 2 << 10;  // bytes of V prefetched with K; hides memory latency

Prefetch Lines(const uint8_t* begin, int64_t bytes, int64_t later) noexcept {
  const int64_t half = (bytes + 2 * kLine - 1) / (2 * kLine) * kLine;
  return {.next = begin, .end = begin + half, .second = half, .later = later};
}

}  // namespace

const PrefetchPlan::Ranges PrefetchPlan::kNoRanges = {};

PrefetchPlan::PrefetchPlan(const LayerView& layer, const QueryTile& tile, int64_t first_split, int64_t last_split,
                           const cache::PageRef* pages, QueryRows rows, int64_t two_part_bytes) noexcept
    : layer_(layer),
      tile_(tile),
      two_part_bytes_(two_part_bytes),
      pages_(pages),
      rows_(rows),
      page_size_(layer.scheme->shape.tokens),
      own_page_(tile.first / page_size_),
      first_split_(first_split),
      last_split_(last_split),
      own_(RangesOf(layer.Cells(Kind(own_page_)),
                    std::min<int64_t>(page_size_, tile.last_key + 1 - own_page_ * page_size_))) {
  for (const cache::PageKind kind : cache::kPageKinds) {
    if (layer.Has(kind)) whole_[cache::KindIndex(kind)] = RangesOf(layer.Cells(kind), page_size_);
  }
  VisitSplits([this](int64_t split) { final_page_ = PagesOf(split).Last(); });
}

int64_t PrefetchPlan::NextSplit(int64_t split) const noexcept {
  const int own = layer_.classes.Own();
  int64_t next = split < 0 ? first_split_ : split + own;
  for (;; next += own) {
    if (next >= last_split_) {  // the next class, if the splits are of several
      if (last_split_ - first_split_ < own) return last_split_;
      const int index = layer_.classes.Next(static_cast<int>((next - first_split_) % own));
      if (index == own) return last_split_;
      next = first_split_ + index;
    }
    if (!PagesOf(next).IsEmpty()) return next;
  }
}

const float* PrefetchPlan::QueryOf(int head, int token, int of_head) const noexcept {
  const AttentionSpec& attention = *layer_.attention;
  const int64_t group = attention.heads / attention.kv_heads;
  return rows_.q + token * rows_.q_stride + ((int64_t{tile_.kv_head} + head) * group + of_head) * attention.KeyDim();
}

float* PrefetchPlan::ResultOf(int head, int token, int of_head) const noexcept {
  const AttentionSpec& attention = *layer_.attention;
  const int64_t group = attention.heads / attention.kv_heads;
  const int64_t of_token = (int64_t{tile_.kv_head} + head) * group + of_head;
  return rows_.out + (int64_t{token} * attention.heads + of_token) * attention.head_dim;
}

// Queries and results of a KV head, for a query tile of one token.
Prefetch PrefetchPlan::RowsOf(int head) const noexcept {
  const auto* queries = reinterpret_cast<const uint8_t*>(QueryOf(head, 0, 0));
  const auto* end = reinterpret_cast<const uint8_t*>(QueryOf(head + 1, 0, 0));
  const auto* results = reinterpret_cast<const uint8_t*>(ResultOf(head, 0, 0));
  return {.next = queries, .end = end, .second = results - queries};
}

// seen: number of the page's tokens that the tile sees.
PrefetchPlan::Ranges PrefetchPlan::RangesOf(const PageCells& cells, int64_t seen) const noexcept {
  const CellSide &k = cells.k, &v = cells.v;
  const int64_t bytes = cells.head_bytes;
  if (layer_.scheme->SharesCell()) return {.start = bytes};
  if (seen < page_size_) {  // the open page: only the tokens it holds
    return {.start = k.bytes * RoundUp(seen, 16) / page_size_,
            .with_offset = v.codes - k.codes,
            .with = v.bytes * RoundUp(seen, 4) / page_size_};
  }
  // A head's K and V cells are contiguous.
  const int64_t start = bytes <= two_part_bytes_ ? std::min(v.codes - k.codes + kValuePrefetchBytes, bytes) : bytes;
  return {.start = start, .rest = bytes - start};
}

KVANTA_INLINE PrefetchPlan::Page PrefetchPlan::FirstHeadOf(int64_t page) const noexcept {
  const PageView view = layer_.View(own_page_, page, pages_[page], tile_.kv_head);
  return {view, view.record + view.cells->k.codes, page == own_page_ ? &own_ : &whole_[cache::KindIndex(view.kind)]};
}

void PrefetchPlan::SetNext(PrefetchPlan& next) noexcept {
  __builtin_prefetch(next.pages_ + next.PagesOf(next.NextSplit(-1)).first);
  next_ = &next;
  next.start_prefetched_ = true;
}

template <int kLocality>
void PrefetchPlan::PrefetchStart(const Page& page) noexcept {
  const uint8_t* end = page.keys + page.ranges->start;
  for (const uint8_t* line = page.keys; line < end; line += kLine) __builtin_prefetch(line, 0, kLocality);
}

void PrefetchPlan::Begin() noexcept {
  later_plan_ = this;
  BeginSplit(NextSplit(-1));
  current_ = later_;
  AdvanceLater();
  after_ = later_;
  AdvanceLater();
  if (start_prefetched_) return;
  constexpr int kLevel1 = 3, kLevel2 = 2;  // locality arguments
  PrefetchStart<kLevel1>(current_);
  PrefetchStart<kLevel2>(after_);  // kernels may prefetch no page before the one read after it
}

void PrefetchPlan::Advance() noexcept {
  current_ = after_;
  after_ = later_;
  AdvanceLater();
}

void PrefetchPlan::AdvanceLater() noexcept {
  if (later_plan_ == nullptr) return;
  const QueryTile& tile = later_plan_->tile_;
  if (++later_.view.kv_head < tile.kv_head + tile.kv_heads) {
    later_.view.record += later_.view.cells->head_bytes;
    later_.keys += later_.view.cells->head_bytes;
    return;
  }
  later_page_ += later_plan_->layer_.classes.of;
  if (later_page_ < later_end_) {
    later_ = later_plan_->FirstHeadOf(later_page_);
    return;
  }
  int64_t split = later_plan_->NextSplit(later_split_);
  if (split >= later_plan_->last_split_) {
    later_plan_ = later_plan_->next_;
    if (later_plan_ == nullptr) {
      later_ = Page{};
      return;
    }
    split = later_plan_->NextSplit(-1);
  }
  BeginSplit(split);
}

// Sets later_ to the first page of a split of later_plan_.
void PrefetchPlan::BeginSplit(int64_t split) noexcept {
  const SplitPages pages = later_plan_->PagesOf(split);
  later_split_ = split;
  later_page_ = pages.first;
  later_end_ = pages.end;
  later_ = later_plan_->FirstHeadOf(later_page_);
}

void PrefetchPlan::SetPrefetches(int64_t page, Prefetch& qk, Prefetch& softmax, Prefetch& pv) const noexcept {
  const Ranges &now = *current_.ranges, &after = *after_.ranges, &later = *later_.ranges;
  const bool fetches_rows = page == final_page_ && next_ != nullptr && tile_.tokens == 1;
  const int head = current_.view.kv_head - tile_.kv_head;
  const int64_t lines = (after.start + 2 * kLine - 1) / (2 * kLine);  // per stream; there are two
  const int64_t qk_end = now.rest != 0 || fetches_rows ? 0 : lines * 3 / 8;
  const bool softmax_fetches_start = after.with == 0 && !(now.rest != 0 && fetches_rows);
  const int64_t softmax_end = qk_end + (softmax_fetches_start ? std::min((lines - qk_end) / 5, kSoftmaxLines) : 0);
  // Pages of different sizes have no common offset.
  const int64_t to_later = after.start == later.start ? later_.keys - after_.keys : 0;
  const auto part = [&](int64_t first, int64_t last) {
    return Prefetch{.next = after_.keys + first * kLine,
                    .end = after_.keys + last * kLine,
                    .second = lines * kLine,
                    .later = to_later};
  };
  if (now.rest != 0) {
    qk = Lines(current_.keys + now.start, now.rest, now.rest == after.rest ? after_.keys - current_.keys : 0);
  } else {
    qk = fetches_rows ? next_->RowsOf(head) : part(0, qk_end);
  }
  if (softmax_fetches_start) {
    softmax = part(qk_end, softmax_end);
  } else {
    softmax = after.with != 0 ? Lines(after_.keys + after.with_offset, after.with, 0) : next_->RowsOf(head);
  }
  pv = part(softmax_end, lines);
}

}  // namespace kvanta::attention
