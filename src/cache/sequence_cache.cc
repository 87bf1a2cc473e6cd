#include "cache/sequence_cache.h"

#include <algorithm>
#include <cassert>
#include <limits>

namespace kvanta::cache {

PageRequirements::PageRequirements(const formats::CacheLayout& layout, int64_t window)
    : page_size(layout.page_size),
      page_bytes(layout.page_bytes),
      exact_page_bytes(layout.exact_page_bytes),
      quantized_while_open(false),
      quantized_from(std::numeric_limits<int>::max()),
      sliding_window(window) {
  for (const formats::LayerScheme& layer : layout.layers) {
    if (layer.exact_open) {
      exact_while_open = true;
      exact_behind = std::max(exact_behind, layer.exact_pages - 1);
      sink_pages = std::max(sink_pages, layer.sink_pages);
      quantized_from = std::min(quantized_from, layer.sink_pages);
    } else {
      quantized_while_open = true;
    }
  }
}

int64_t PageRequirements::MaxBytes(int64_t tokens, int64_t step_pages) const noexcept {
  const int64_t pages = (tokens + page_size - 1) / page_size;
  int64_t quantized = pages;
  if (!quantized_while_open) quantized = std::max<int64_t>(0, tokens / page_size - quantized_from);
  if (sliding_window > 0 && !prefixes_stay)
    quantized = std::min(quantized, (sliding_window - 1) / page_size + 2 + step_pages);
  int64_t exact = 0;
  if (exact_while_open) {
    const int64_t sinks = std::min<int64_t>(pages, sink_pages);
    exact = sinks + std::min(pages - sinks, step_pages + exact_behind);
  }
  return quantized * page_bytes + exact * exact_page_bytes;
}

SequenceCache::SequenceCache(PagePool& store, PrefixTree* tree, const PageRequirements& demand, std::string salt,
                             Sharing sharing)
    : store_(store), tree_(tree), demand_(demand), salt_(std::move(salt)), sharing_(sharing) {}

SequenceCache::~SequenceCache() {
  Clear();
}

void SequenceCache::Drop(PageKind kind, PageId& page) noexcept {
  if (page == kNoPage) return;
  store_.Release(kind, page);
  page = kNoPage;
}

void SequenceCache::Clear() noexcept {
  for (PageRef& page : pages_) {
    Drop(PageKind::kQuantized, page.quantized);
    Drop(PageKind::kExact, page.exact);
  }
  pages_.clear();
  length_ = reserved_ = behind_window_ = 0;
  exact_miss_ = -1;
}

int64_t SequenceCache::MatchPrefix(std::span<const int32_t> tokens) {
  assert(pages_.empty());
  if (tree_ == nullptr || sharing_ == Sharing::kPrivate || tokens.empty()) return 0;
  const int64_t limit = (static_cast<int64_t>(tokens.size()) - 1) / demand_.page_size;
  pages_ = tree_->Match(tokens, salt_, limit);
  // The next query reads the last of these exactly, in some layers: the hit ends where that record is.
  const int64_t found = PageCount();
  while (demand_.exact_behind > 0 && !pages_.empty() && pages_.back().exact == kNoPage) {
    Drop(PageKind::kQuantized, pages_.back().quantized);
    pages_.pop_back();
  }
  exact_miss_ = PageCount() < found ? found - 1 : -1;
  for (int64_t page = demand_.sink_pages; page < PageCount() - demand_.exact_behind; ++page) {
    Drop(PageKind::kExact, pages_[static_cast<size_t>(page)].exact);  // of another sequence's end
  }
  length_ = static_cast<int64_t>(pages_.size()) * demand_.page_size;
  FreeBehindWindow();
  return length_;
}

int64_t SequenceCache::BytesToReserve(int64_t count) const noexcept {
  int64_t bytes = 0;
  const int64_t size = demand_.page_size;
  for (int64_t page = length_ / size; page * size < length_ + count; ++page) {
    const PageRef have = page < PageCount() ? pages_[static_cast<size_t>(page)] : PageRef{};
    const bool closed = (page + 1) * size <= length_ + count;
    if (have.quantized == kNoPage && demand_.NeedsQuantized(page, closed)) bytes += demand_.page_bytes;
    if (have.exact == kNoPage && demand_.NeedsExact(page, true)) bytes += demand_.exact_page_bytes;
  }
  return bytes;
}

bool SequenceCache::Reserve(int64_t count) {
  assert(count > 0 && reserved_ == 0);
  // Undone on failure: records taken here, in order.
  std::vector<std::pair<PageKind, PageId*>> taken;
  const int64_t size = demand_.page_size;
  const size_t pages_before = pages_.size();
  const int64_t last = (length_ + count - 1) / size;
  pages_.resize(std::max<size_t>(pages_before, static_cast<size_t>(last + 1)));
  const auto take = [&](PageKind kind, PageId& page) {
    page = store_.Allocate(kind);
    if (page == kNoPage && tree_ != nullptr && tree_->EvictOne(kind)) page = store_.Allocate(kind);
    if (page == kNoPage) return false;
    taken.emplace_back(kind, &page);
    return true;
  };
  bool complete = true;
  for (int64_t index = length_ / size; complete && index <= last; ++index) {
    PageRef& page = pages_[static_cast<size_t>(index)];
    const bool closed = (index + 1) * size <= length_ + count;
    if (page.quantized == kNoPage && demand_.NeedsQuantized(index, closed)) {
      complete = take(PageKind::kQuantized, page.quantized);
    }
    if (complete && page.exact == kNoPage && demand_.NeedsExact(index, true)) {
      complete = take(PageKind::kExact, page.exact);
    }
  }
  if (!complete) {
    for (const auto& [kind, page] : taken) Drop(kind, *page);
    pages_.resize(pages_before);
    return false;
  }
  reserved_ = count;
  return true;
}

// Offers a page that has closed to the tree; returns what the sequence goes on with, whose records it owns.
PageRef SequenceCache::Share(std::span<const int32_t> tokens, int64_t index, PageRef page) {
  const bool is_sink = demand_.NeedsExact(index, false);
  // Of a page that is exact only for a while, the tree gets the quantized record; the exact one stays with the
  // sequence.
  const PageRef offered{page.quantized, is_sink ? page.exact : kNoPage};
  PageRef shared = tree_->Insert(tokens.first(static_cast<size_t>(length_)), salt_, index, offered);
  if (!is_sink) shared.exact = page.exact;
  if (shared == page) return page;
  if (shared.quantized != page.quantized) {
    if (shared.quantized != kNoPage) store_.Retain(PageKind::kQuantized, shared.quantized);
    Drop(PageKind::kQuantized, page.quantized);
  }
  if (shared.exact != page.exact) {
    if (shared.exact != kNoPage) store_.Retain(PageKind::kExact, shared.exact);
    Drop(PageKind::kExact, page.exact);
  }
  return shared;
}

// Lets the tree keep the exact record of a closed page, so that a later prefix hit may end there.
void SequenceCache::ShareExact(std::span<const int32_t> tokens, int64_t index) {
  if (tree_ == nullptr || sharing_ == Sharing::kPrivate || index < 0 || index >= PageCount()) return;
  const PageId exact = pages_[static_cast<size_t>(index)].exact;
  if (exact != kNoPage) tree_->AttachExact(tokens.first(static_cast<size_t>(length_)), salt_, index, exact);
}

void SequenceCache::Commit(std::span<const int32_t> tokens) {
  const int64_t size = demand_.page_size;
  const int64_t first_open = length_ / size;
  length_ += reserved_;
  reserved_ = 0;
  assert(static_cast<int64_t>(tokens.size()) >= length_);
  const int64_t open = length_ / size;
  for (int64_t index = first_open; index < open; ++index) {
    PageRef& page = pages_[static_cast<size_t>(index)];
    if (tree_ != nullptr && sharing_ == Sharing::kShared) page = Share(tokens, index, page);
    if (index == exact_miss_) ShareExact(tokens, index);
  }
  // The next query's page and those behind it that it reads exactly stay so.
  for (int64_t index = std::max<int64_t>(0, first_open - demand_.exact_behind); index < open - demand_.exact_behind;
       ++index) {
    if (!demand_.NeedsExact(index, false)) Drop(PageKind::kExact, pages_[static_cast<size_t>(index)].exact);
  }
  FreeBehindWindow();
}

void SequenceCache::Finish(std::span<const int32_t> tokens) {
  if (demand_.exact_behind > 0) ShareExact(tokens, length_ / demand_.page_size - 1);
  Clear();
}

void SequenceCache::FreeBehindWindow() noexcept {
  if (demand_.sliding_window <= 0) return;
  // The next query stands at length_ and sees positions above length_ - window.
  const int64_t dead = std::max<int64_t>(0, (length_ - demand_.sliding_window + 1) / demand_.page_size);
  for (; behind_window_ < dead; ++behind_window_) {
    PageRef& page = pages_[static_cast<size_t>(behind_window_)];
    Drop(PageKind::kQuantized, page.quantized);
    Drop(PageKind::kExact, page.exact);
  }
}

}  // namespace kvanta::cache
