#include "attention/prefetch_plan.h"

#include <algorithm>

#include "base/math.h"

namespace kvanta::attention {
namespace {

using kernels::Prefetch;

constexpr int64_t kLine = 64;
constexpr int64_t kSoftmaxLines = 16;             // per stream; limit of what softmax can prefetch in its time
constexpr int64_t kValuePrefetchBytes = 2 << 10;  // bytes of V prefetched with K; hides memory latency

Prefetch Lines(const uint8_t* begin, int64_t bytes) noexcept {
  const int64_t half = (bytes + 2 * kLine - 1) / (2 * kLine) * kLine;
  return {.next = begin, .end = begin + half, .second = half};
}

}  // namespace

PrefetchPlan::PrefetchPlan(const LayerView& layer, const QueryTile& tile, int64_t first_split, int64_t last_split,
                           const cache::PageRef* pages, QueryRows rows, int64_t two_part_bytes) noexcept
    : layer_(layer),
      tile_(tile),
      two_part_bytes_(two_part_bytes),
      pages_(pages),
      rows_(rows),
      page_size_(layer.scheme->shape.tokens),
      own_page_(tile.first / page_size_),
      first_page_(std::max(layer.attention->visibility.First(tile.first) / page_size_,
                           first_split * kSplitTokens / page_size_)),
      last_page_(std::min(own_page_ + 1, last_split * kSplitTokens / page_size_)) {}

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

PrefetchPlan::Spans PrefetchPlan::PrefetchRanges(HeadPage at) const noexcept {
  const PageView view = View(at);
  const CellSide &k = view.cells->k, &v = view.cells->v;
  const uint8_t* keys = view.record + k.codes;
  if (layer_.scheme->SharesCell()) return {.start = {keys, view.cells->head_bytes}};
  const uint8_t* values = view.record + v.codes;
  const int64_t seen = tile_.first + tile_.tokens - at.page * page_size_;
  if (seen < page_size_) {  // the open page: only the tokens it holds
    return {.start = {keys, k.bytes * RoundUp(seen, 16) / page_size_},
            .with = {values, v.bytes * RoundUp(seen, 4) / page_size_}};
  }
  // A head's K and V cells are contiguous.
  const int64_t bytes = view.cells->head_bytes;
  const int64_t start = bytes <= two_part_bytes_ ? std::min(values - keys + kValuePrefetchBytes, bytes) : bytes;
  return {.start = {keys, start}, .rest = {keys + start, bytes - start}};
}

void PrefetchPlan::SetNext(PrefetchPlan& next) noexcept {
  __builtin_prefetch(next.pages_ + next.first_page_);
  next_ = &next;
  next.start_prefetched_ = true;
}

void PrefetchPlan::PrefetchFirst() const noexcept {
  if (start_prefetched_) return;
  const Span start = PrefetchRanges({first_page_, 0}).start;
  for (const uint8_t* line = start.begin; line < start.begin + start.bytes; line += kLine) __builtin_prefetch(line);
}

PrefetchPlan::Spans PrefetchPlan::NextPrefetchRanges(HeadPage at) const noexcept {
  if (at.head + 1 < tile_.kv_heads) return PrefetchRanges({at.page, at.head + 1});
  if (at.page + 1 < last_page_) return PrefetchRanges({at.page + 1, 0});
  if (next_ != nullptr) return next_->PrefetchRanges({next_->first_page_, 0});
  return {};
}

// Computes plain numbers before building the result: copying a struct right after its members were written stalls on
// store forwarding.
PrefetchStages PrefetchPlan::PrefetchOf(HeadPage at) const noexcept {
  const Spans now = PrefetchRanges(at), after = NextPrefetchRanges(at);
  const bool fetches_rows = at.page + 1 == last_page_ && next_ != nullptr && tile_.tokens == 1;
  const bool has_rest = now.rest.bytes != 0;
  const uint8_t* start = after.start.begin;
  const int64_t lines = (after.start.bytes + 2 * kLine - 1) / (2 * kLine);  // per stream; there are two
  const int64_t qk_end = has_rest || fetches_rows ? 0 : lines * 3 / 8;
  const bool softmax_fetches_start = after.with.bytes == 0 && !(has_rest && fetches_rows);
  const int64_t softmax_end = qk_end + (softmax_fetches_start ? std::min((lines - qk_end) / 5, kSoftmaxLines) : 0);
  const auto part = [&](int64_t first, int64_t last) {
    return Prefetch{.next = start + first * kLine, .end = start + last * kLine, .second = lines * kLine};
  };
  return {.qk = has_rest       ? Lines(now.rest.begin, now.rest.bytes)
                : fetches_rows ? next_->RowsOf(at.head)
                               : part(0, qk_end),
          .softmax = softmax_fetches_start   ? part(qk_end, softmax_end)
                     : after.with.bytes != 0 ? Lines(after.with.begin, after.with.bytes)
                                             : next_->RowsOf(at.head),
          .pv = part(softmax_end, lines)};
}

}  // namespace kvanta::attention
