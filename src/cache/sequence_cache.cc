#include "cache/sequence_cache.h"

#include <algorithm>
#include <cassert>

#include "cache/state_records.h"

namespace kvanta::cache {

SequenceCache::SequenceCache(KvCacheManager& manager, std::string salt, Sharing sharing)
    : manager_(manager),
      salt_(std::move(salt)),
      sharing_(manager.prefix ? sharing : Sharing::kPrivate),
      pages_(manager.spec.groups.size()),
      tables_(pages_.size()),
      first_page_(pages_.size()),
      records_(pages_.size()),
      snapshots_(pages_.size()) {}

SequenceCache::~SequenceCache() {
  Clear();
}

void SequenceCache::Drop(int group, PageKind kind, PageId& page) noexcept {
  if (page == kNoPage) return;
  manager_.pool.Release(group, kind, page);
  page = kNoPage;
}

void SequenceCache::Resize(size_t pages) {
  for (size_t g = 0; g < pages_.size(); ++g) {
    pages_[g].resize(pages);
    tables_[g] = pages_[g].data();
  }
}

void SequenceCache::Clear() noexcept {
  for (size_t g = 0; g < pages_.size(); ++g) {
    for (PageRef& page : pages_[g]) {
      for (const PageKind kind : kPageKinds) Drop(static_cast<int>(g), kind, page.Of(kind));
    }
    pages_[g].clear();
    first_page_[g] = 0;
    snapshots_[g] = {};
  }
  length_ = reserved_ = 0;
  missed_page_ = prompt_page_ = -1;
  events_.clear();
  next_event_ = 0;
}

int64_t SequenceCache::MatchPrefix(std::span<const int32_t> tokens) {
  assert(PageCount() == 0);
  if (sharing_ == Sharing::kPrivate || tokens.empty() || Replays()) return 0;
  const int64_t size = manager_.spec.page_size;
  const int64_t max_pages = (static_cast<int64_t>(tokens.size()) - 1) / size;
  PrefixCache::Prefix prefix = manager_.prefix->Match(tokens, salt_, max_pages);
  prompt_page_ = max_pages - 1;
  missed_page_ = prefix.pages < prefix.known ? prefix.known - 1 : -1;
  pages_ = std::move(prefix.records);
  events_ = std::move(prefix.events);
  Resize(static_cast<size_t>(prefix.pages));
  length_ = prefix.pages * size;
  FreeInvisible();
  return length_;
}

int64_t SequenceCache::CachedTokens(std::span<const int32_t> tokens) const {
  if (!manager_.prefix || sharing_ == Sharing::kPrivate || tokens.empty()) return 0;
  std::vector<uint8_t> present;
  const int64_t page_size = manager_.spec.page_size;
  return page_size * manager_.prefix->Present(tokens, salt_, (std::ssize(tokens) - 1) / page_size, present);
}

void SequenceCache::HoldPrefix(std::span<const int32_t> tokens, HeldRecords& held) const {
  SequenceCache prefix(manager_, salt_, sharing_);
  prefix.MatchPrefix(tokens);
  for (size_t g = 0; g < prefix.pages_.size(); ++g) {
    for (const PageRef& page : prefix.pages_[g]) {
      for (const PageKind kind : kPageKinds) {
        if (page.Of(kind) != kNoPage) held.Hold(static_cast<int>(g), kind, page.Of(kind));
      }
    }
  }
}

int64_t SequenceCache::StepTokens(int64_t count) const noexcept {
  for (const KvCacheGroup& group : manager_.spec.groups) {
    const int64_t grid = group.state_grid * group.page_size;
    if (grid != 0) count = std::min(count, grid - length_ % grid);
  }
  for (size_t i = next_event_; i < replay_.size(); ++i) {
    if (replay_[i].position > length_) return std::min(count, replay_[i].position - length_);
  }
  return count;
}

// Records of the page of the last token, which has the working state of a recurrent group.
PageRef SequenceCache::LastState(size_t group) const noexcept {
  return length_ == 0 ? PageRef{} : pages_[group][static_cast<size_t>((length_ - 1) / manager_.spec.page_size)];
}

template <class Visit>
void SequenceCache::VisitMissing(int64_t count, Visit visit) const {
  const int64_t size = manager_.spec.page_size;
  // After a prefix hit, a rounded state has no f32 form.
  for (size_t g = 0; g < pages_.size(); ++g) {
    if (!manager_.spec.groups[g].RoundsStates() || length_ == 0 || LastState(g).exact != kNoPage) continue;
    if (!visit(g, PageKind::kExact, (length_ - 1) / size)) return;
  }
  const int64_t last = (length_ + count - 1) / size;
  for (int64_t index = length_ / size; index <= last; ++index) {
    const bool closed = (index + 1) * size <= length_ + count;
    for (size_t g = 0; g < pages_.size(); ++g) {
      const KvCacheGroup& group = manager_.spec.groups[g];
      // By value: visit may fill it in.
      const PageRef page = index < PageCount() ? pages_[g][static_cast<size_t>(index)] : PageRef{};
      if (group.IsRecurrent()) {
        if (index == last && page.Of(group.WorkingKind()) == kNoPage && !visit(g, group.WorkingKind(), index)) return;
        continue;
      }
      if (page.quantized == kNoPage && group.NeedsQuantized(index, closed)) {
        if (!visit(g, PageKind::kQuantized, index)) return;
      }
      if (page.exact == kNoPage && group.NeedsExact(index, true)) {
        if (!visit(g, PageKind::kExact, index)) return;
      }
    }
  }
  // Later levels of pages that age in the step.
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (!group.ages.IsUsed()) continue;
    const int64_t end = group.FirstYoung(length_ + count);
    for (int64_t index = group.FirstYoung(length_); index < end; ++index) {
      const PageRef page = index < PageCount() ? pages_[g][static_cast<size_t>(index)] : PageRef{};
      for (const PageKind kind : kAgedKinds) {
        if (page.Of(kind) == kNoPage && group.Reaches(kind, index) && !visit(g, kind, index)) return;
      }
    }
  }
}

int64_t SequenceCache::BytesToReserve(int64_t count) const noexcept {
  int64_t bytes = 0;
  VisitMissing(count, [&](size_t group, PageKind kind, int64_t) {
    bytes += manager_.pool.RecordBytes(static_cast<int>(group), kind);
    return true;
  });
  return bytes;
}

bool SequenceCache::Reserve(int64_t count) {
  assert(count > 0 && reserved_ == 0);
  assert(next_event_ == replay_.size() || replay_[next_event_].position > length_);
  struct Taken {
    int group;
    PageKind kind;
    PageId* page;
  };
  std::vector<Taken> taken;  // rolled back on failure
  const auto pages_before = static_cast<size_t>(PageCount());
  const int64_t pages = (length_ + count - 1) / manager_.spec.page_size + 1;
  Resize(std::max(pages_before, static_cast<size_t>(pages)));
  bool complete = true, restores = false;
  VisitMissing(count, [&](size_t g, PageKind kind, int64_t index) {
    const int group = static_cast<int>(g);
    PageId& page = pages_[g][static_cast<size_t>(index)].Of(kind);
    page = manager_.Allocate(group, kind, index);
    if (page == kNoPage) return complete = false;
    taken.push_back({group, kind, &page});
    restores = restores || (manager_.spec.groups[g].RoundsStates() && index * manager_.spec.page_size < length_);
    return true;
  });
  if (!complete) {
    for (const Taken& record : taken) Drop(record.group, record.kind, *record.page);
    Resize(pages_before);
    return false;
  }
  if (restores) RestoreStates();
  ReserveSnapshots(count);
  reserved_ = count;
  return true;
}

// True if the state at the end of the page is kept for later prefix hits: at regular intervals, where another prompt
// left the cached path or may do so again, and at the end of the prompt.
bool SequenceCache::WantsSnapshot(const KvCacheGroup& group, int64_t page) const noexcept {
  return page == group.LastSnapshotPage(missed_page_) || page == group.LastSnapshotPage(prompt_page_) ||
         group.KeepsSnapshot(page);
}

// Decodes states after a prefix hit into the records that the next step reads.
void SequenceCache::RestoreStates() {
  for (size_t g = 0; g < pages_.size(); ++g) {
    if (manager_.spec.groups[g].RoundsStates()) ChangeState(g, RecordChangeKind::kRestoreState);
  }
}

// Rounds the working states where the committed tokens end at the grid, and stores their code where it has a record.
void SequenceCache::RoundStates() {
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (!group.RoundsStates() || length_ % (group.state_grid * group.page_size) != 0) continue;
    ChangeState(g, RecordChangeKind::kRoundState);
  }
}

void SequenceCache::ChangeState(size_t group, RecordChangeKind kind) {
  const PageRef page = LastState(group);
  const RecordChange change{
      .kind = kind, .record = {static_cast<int32_t>(group), PageKind::kExact, page.exact}, .coded = page.quantized};
  cache::ChangeState(manager_.pool, change, manager_.threads);
  manager_.pool.ListChange(change);
}

// Records for states inside the reserved range, as far as there is memory: a step works without them.
void SequenceCache::ReserveSnapshots(int64_t count) {
  if (sharing_ == Sharing::kPrivate) return;
  const int64_t size = manager_.spec.page_size;
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (!group.IsRecurrent()) continue;
    for (int64_t index = length_ / size; (index + 1) * size <= length_ + count; ++index) {
      PageId& page = pages_[g][static_cast<size_t>(index)].quantized;
      const bool keeps = group.RoundsStates() ? group.LastSnapshotPage(index) == index : WantsSnapshot(group, index);
      if (page != kNoPage || !keeps) continue;
      page = manager_.Allocate(static_cast<int>(g), PageKind::kQuantized, index, group.page_bytes);
    }
  }
}

// Collects states in the prefix cache that were the sequence's last one before the latest closed page.
void SequenceCache::ReplaceSnapshots(std::span<const int32_t> tokens, int64_t first, int64_t closed) {
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (!group.IsRecurrent()) continue;
    for (int64_t page = first; page < closed; ++page) {
      const PageId own = pages_[g][static_cast<size_t>(page)].quantized;
      const std::span<const PageRef> cached = manager_.prefix->Peek(tokens, salt_, page, events_);
      if (own == kNoPage || cached.empty() || cached[g].quantized != own) continue;
      Snapshot& last = snapshots_[g];
      if (last.page >= 0 && !WantsSnapshot(group, last.page)) replaced_.emplace_back(static_cast<int>(g), last);
      last = {page, own};
    }
  }
}

// Inserts a closed page into the prefix cache and replaces the sequence's records by the cached ones.
void SequenceCache::Share(std::span<const int32_t> tokens, int64_t index) {
  const auto at = static_cast<size_t>(index);
  // A temporary exact record is not shared.
  const auto shares_exact = [&](size_t g) { return manager_.spec.groups[g].NeedsExact(index, false); };
  for (size_t g = 0; g < pages_.size(); ++g) {
    records_[g] = pages_[g][at];
    if (!shares_exact(g)) records_[g].exact = kNoPage;
  }
  if (!manager_.prefix->Insert(tokens.first(static_cast<size_t>(length_)), salt_, index, records_, events_)) return;
  for (size_t g = 0; g < pages_.size(); ++g) {
    for (const PageKind kind : kPageKinds) {
      const PageId shared = records_[g].Of(kind);
      PageId& own = pages_[g][at].Of(kind);
      // Without a record of its own, the sequence does not see the page or the group needs no record.
      if (shared == own || own == kNoPage || (kind == PageKind::kExact && !shares_exact(g))) continue;
      manager_.pool.Retain(static_cast<int>(g), kind, shared);
      Drop(static_cast<int>(g), kind, own);
      own = shared;
    }
  }
}

// Adds the exact records of closed pages up to `index` to the prefix cache, so that a later hit can end there.
void SequenceCache::ShareExact(std::span<const int32_t> tokens, int64_t index) {
  if (sharing_ == Sharing::kPrivate || index >= PageCount()) return;
  for (size_t g = 0; g < pages_.size(); ++g) {
    for (int64_t page = std::max<int64_t>(0, index + 1 - manager_.spec.groups[g].exact_before); page <= index; ++page) {
      const PageId exact = pages_[g][static_cast<size_t>(page)].exact;
      if (exact == kNoPage) continue;
      manager_.prefix->AttachExact(tokens.first(static_cast<size_t>(length_)), salt_, page, static_cast<int>(g), exact,
                                   events_);
    }
  }
}

// Adds later levels of pages that have aged since `length_before` to the prefix cache. Pages from `first_open` on have
// been added with them.
void SequenceCache::ShareAged(std::span<const int32_t> tokens, int64_t length_before, int64_t first_open) {
  if (sharing_ == Sharing::kPrivate) return;
  int64_t first = first_open, end = 0;
  for (const KvCacheGroup& group : manager_.spec.groups) {
    if (!group.ages.IsUsed()) continue;
    first = std::min(first, group.FirstYoung(length_before));
    end = std::max(end, group.FirstYoung(length_));
  }
  for (int64_t index = first; index < std::min(end, first_open); ++index) Share(tokens, index);
}

// Frees records of levels that queries from position length_ on no longer read, and did at `length_before`.
void SequenceCache::FreeAged(int64_t length_before) noexcept {
  const int64_t size = manager_.spec.page_size;
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (!group.ages.IsUsed()) continue;
    const auto drop = [&](PageKind kind, int64_t first, int64_t end) {
      for (int64_t page = std::max<int64_t>(first, group.ages.ageless); page < std::min(end, PageCount()); ++page) {
        Drop(static_cast<int>(g), kind, pages_[g][static_cast<size_t>(page)].Of(kind));
      }
    };
    drop(PageKind::kQuantized, group.FirstYoung(length_before), group.FirstYoung(length_));
    for (size_t next = 1; next < group.ages.Levels(); ++next) {
      const int64_t age = group.ages.pages[next];
      drop(kAgedKinds[next - 1], length_before / size - age + 1, length_ / size - age + 1);
    }
  }
}

void SequenceCache::Commit(std::span<const int32_t> tokens) {
  const int64_t size = manager_.spec.page_size;
  const int64_t length_before = length_;
  const int64_t first_open = length_ / size;
  length_ += reserved_;
  reserved_ = 0;
  assert(static_cast<int64_t>(tokens.size()) >= length_);
  RoundStates();
  const int64_t open = length_ / size;
  for (int64_t index = first_open; index < open; ++index) {
    if (sharing_ == Sharing::kShared) Share(tokens, index);
    if (index == missed_page_ || index == prompt_page_) ShareExact(tokens, index);
  }
  ShareAged(tokens, length_before, first_open);
  if (sharing_ == Sharing::kShared) ReplaceSnapshots(tokens, first_open, open);
  // Frees exact records, except of the next query's page and of the pages before it that it reads exactly.
  for (size_t g = 0; g < pages_.size(); ++g) {
    const KvCacheGroup& group = manager_.spec.groups[g];
    if (group.IsRecurrent()) continue;  // FreeInvisible keeps the last token's page
    for (int64_t index = std::max<int64_t>(0, first_open - group.exact_before); index < open - group.exact_before;
         ++index) {
      if (!group.NeedsExact(index, false)) {
        Drop(static_cast<int>(g), PageKind::kExact, pages_[g][static_cast<size_t>(index)].exact);
      }
    }
  }
  FreeAged(length_before);
  FreeInvisible();
  for (const auto& [group, snapshot] : replaced_) {
    manager_.prefix->DropRecord(tokens, salt_, snapshot.page, group, snapshot.record, events_);
  }
  replaced_.clear();
}

void SequenceCache::Extend(int64_t count) noexcept {
  assert(reserved_ == 0 && length_ > 0);
  assert(count == 0 || (length_ + count) / manager_.spec.page_size == (length_ - 1) / manager_.spec.page_size);
  length_ += count;
}

void SequenceCache::Finish(std::span<const int32_t> tokens) {
  if (length_ > 0) ShareExact(tokens, length_ / manager_.spec.page_size - 1);
  Clear();
}

// Frees records that queries from position length_ on do not see.
void SequenceCache::FreeInvisible() noexcept {
  for (size_t g = 0; g < pages_.size(); ++g) {
    const int64_t visible = std::min(manager_.spec.groups[g].FirstPage(length_), PageCount());
    for (int64_t& page = first_page_[g]; page < visible; ++page) {
      for (const PageKind kind : kPageKinds) {
        Drop(static_cast<int>(g), kind, pages_[g][static_cast<size_t>(page)].Of(kind));
      }
    }
  }
}

}  // namespace kvanta::cache
