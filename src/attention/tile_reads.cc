#include "attention/tile_reads.h"

#include <algorithm>
#include <utility>

namespace kvanta::attention {
namespace {

using kernels::Prefetch;

constexpr int64_t kLine = 64;
constexpr int64_t kSoftmaxLines = 16;      // of each stream, that a softmax has the time to touch
constexpr int64_t kValuesAhead = 2 << 10;  // bytes of a cell's values that are touched with its keys: memory's latency
constexpr int64_t kNearCacheBytes = 20 << 10;  // of a page of a head beside its queries, scores and results

Prefetch Lines(const uint8_t* begin, int64_t bytes) noexcept {
  const int64_t half = (bytes + 2 * kLine - 1) / (2 * kLine) * kLine;
  return {.next = begin, .end = begin + half, .second = half};
}

// Of each stream.
int64_t CountLines(const Prefetch& lines) noexcept {
  return (lines.end - lines.next) / kLine;
}

// The next lines of both streams of `from`, and they are no longer of it.
Prefetch TakeLines(Prefetch& from, int64_t lines) noexcept {
  Prefetch part = from;
  part.end = from.next += lines * kLine;
  return part;
}

}  // namespace

TileReads::TileReads(const LayerView& layer, const Tile& tile, int64_t first_run, int64_t last_run,
                     const cache::PageRef* pages, TileRows rows) noexcept
    : layer_(layer),
      tile_(tile),
      pages_(pages),
      rows_(rows),
      page_size_(layer.scheme->shape.tokens),
      own_page_(tile.first / page_size_),
      first_page_(std::max(FirstVisible(tile.first, layer.attention->sliding_window) / page_size_,
                           first_run * kRunTokens / page_size_)),
      last_page_(std::min(own_page_ + 1, last_run * kRunTokens / page_size_)) {}

const float* TileReads::QueryOf(int head, int token, int of_head) const noexcept {
  const LayerAttention& attention = *layer_.attention;
  const int64_t group = attention.heads / attention.kv_heads;
  return rows_.q + token * rows_.q_stride + ((int64_t{tile_.kv_head} + head) * group + of_head) * attention.KeyDim();
}

float* TileReads::ResultOf(int head, int token, int of_head) const noexcept {
  const LayerAttention& attention = *layer_.attention;
  const int64_t group = attention.heads / attention.kv_heads;
  const int64_t of_token = (int64_t{tile_.kv_head} + head) * group + of_head;
  return rows_.out + (int64_t{token} * attention.heads + of_token) * attention.head_dim;
}

// The queries of a KV head and where its results go, of a tile of one token.
Prefetch TileReads::RowsOf(int head) const noexcept {
  const auto* queries = reinterpret_cast<const uint8_t*>(QueryOf(head, 0, 0));
  const auto* end = reinterpret_cast<const uint8_t*>(QueryOf(head + 1, 0, 0));
  const auto* results = reinterpret_cast<const uint8_t*>(ResultOf(head, 0, 0));
  return {.next = queries, .end = end, .second = results - queries};
}

TileReads::Spans TileReads::SpansOf(HeadPage at) const noexcept {
  const PageView view = View(at);
  const CellSide &k = view.cells->k, &v = view.cells->v;
  const uint8_t* keys = view.record + k.codes;
  if (layer_.scheme->SharesCell()) return {.start = {keys, view.cells->head_bytes}};
  const uint8_t* values = view.record + v.codes;
  const int64_t seen = tile_.first + tile_.tokens - at.page * page_size_;
  if (seen < page_size_) {  // the own page: no more than it holds so far
    const int64_t groups = (seen + 15) / 16, quads = (seen + 3) / 4;
    return {.start = {keys, k.bytes * 16 * groups / page_size_}, .with = {values, v.bytes * 4 * quads / page_size_}};
  }
  // All cells of the head, which lie one behind the other. A second-level cache holds them whole, the first one halves.
  const int64_t bytes = view.cells->head_bytes;
  const int64_t start = bytes <= kNearCacheBytes ? std::min(values - keys + kValuesAhead, bytes) : bytes;
  return {.start = {keys, start}, .rest = {keys + start, bytes - start}};
}

void TileReads::Precede(TileReads& next) noexcept {
  __builtin_prefetch(next.pages_ + next.first_page_);
  next_ = &next;
  next.touched_ = true;
}

void TileReads::TouchStart() const noexcept {
  if (touched_) return;
  const Span start = SpansOf({first_page_, 0}).start;
  for (const uint8_t* line = start.begin; line < start.begin + start.bytes; line += kLine) __builtin_prefetch(line);
}

Ahead TileReads::AheadOf(HeadPage at) const noexcept {
  const Span rest = SpansOf(at).rest;
  const bool is_last_page = at.page + 1 == last_page_;
  Prefetch rows;
  Spans spans;
  if (is_last_page && next_ != nullptr && tile_.tokens == 1) rows = next_->RowsOf(at.head);
  if (at.head + 1 < tile_.kv_heads) {
    spans = SpansOf({at.page, at.head + 1});
  } else if (!is_last_page) {
    spans = SpansOf({at.page + 1, 0});
  } else if (next_ != nullptr) {
    spans = next_->SpansOf({next_->first_page_, 0});
  }
  Ahead ahead = {Lines(rest.begin, rest.bytes), Lines(spans.with.begin, spans.with.bytes),
                 Lines(spans.start.begin, spans.start.bytes)};
  if (CountLines(ahead.scoring) == 0) std::swap(ahead.scoring, rows);
  if (CountLines(ahead.scoring) == 0) ahead.scoring = TakeLines(ahead.adding, CountLines(ahead.adding) * 3 / 8);
  if (CountLines(ahead.weighing) == 0) std::swap(ahead.weighing, rows);
  if (CountLines(ahead.weighing) == 0) {
    ahead.weighing = TakeLines(ahead.adding, std::min(CountLines(ahead.adding) / 5, kSoftmaxLines));
  }
  return ahead;
}

}  // namespace kvanta::attention
