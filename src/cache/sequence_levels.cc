// Precision by pressure in a sequence: demotion of its pages, and the replay of level events.
#include <algorithm>
#include <cassert>

#include "cache/sequence_cache.h"

namespace kvanta::cache {

SequenceCache::LevelRecord SequenceCache::RecordOf(int64_t page) const noexcept {
  for (size_t g = 0; g < pages_.size(); ++g) {
    if (page < first_page_[g] || !manager_.spec.groups[g].IsDemotable(page)) continue;
    const PageRef& held = pages_[g][static_cast<size_t>(page)];
    return {.group = static_cast<int>(g), .level = LevelOf(held), .record = HeldRecordOf(held)};
  }
  return {};
}

int64_t SequenceCache::NextBefore(int level, int64_t page) const noexcept {
  for (const int64_t closed = length_ / manager_.spec.page_size; page < closed; ++page) {
    const LevelRecord held = RecordOf(page);
    if (held.record != kNoPage && held.level < level) return page;
  }
  return -1;
}

std::optional<KvCacheRecord> SequenceCache::Record() const {
  if (manager_.spec.floors == 0) return std::nullopt;
  std::vector<int64_t> pages(static_cast<size_t>(manager_.spec.floors) + 1, 0);
  for (int64_t page = 0; page < length_ / manager_.spec.page_size; ++page) {
    const LevelRecord held = RecordOf(page);
    if (held.record != kNoPage) ++pages[static_cast<size_t>(held.level)];
  }
  return KvCacheRecord{.pages = std::move(pages), .events = events_, .is_replayable = is_replayable_};
}

// Records of the page in the prefix cache, [group]; empty if it is not there.
std::span<const PageRef> SequenceCache::CachedRecords(std::span<const int32_t> tokens, int64_t page) const {
  if (sharing_ == Sharing::kPrivate) return {};
  return manager_.prefix->Peek(tokens, salt_, page, events_);
}

// True if nobody else but the prefix cache holds the page's quantized records.
bool SequenceCache::OwnsLevels(int64_t page, std::span<const PageRef> cached) const noexcept {
  for (size_t g = 0; g < pages_.size(); ++g) {
    const PageId own = pages_[g][static_cast<size_t>(page)].quantized;
    if (own == kNoPage || !manager_.spec.groups[g].IsDemotable(page)) continue;
    const bool is_cached = !cached.empty() && cached[g].quantized == own;
    if (manager_.pool.References(static_cast<int>(g), PageKind::kQuantized, own) != (is_cached ? 2 : 1)) return false;
  }
  return true;
}

// Gives the page of all groups its records of `level` and those after it. frees: what it gives up becomes free.
bool SequenceCache::DemoteRecords(std::span<const int32_t> tokens, int64_t page, int level, bool frees) {
  const double start = manager_.clock();
  const auto at = static_cast<size_t>(page);
  const std::span<const PageRef> cached = CachedRecords(tokens, page);
  std::vector<PageRef> records(pages_.size());  // of groups that demote the page, with a reference to each new one
  for (size_t g = 0; g < pages_.size(); ++g) {
    if (page < first_page_[g] || !manager_.spec.groups[g].IsDemotable(page)) continue;
    records[g] = pages_[g][at];
    for (int each = level; !cached.empty() && each <= manager_.spec.floors; ++each) {
      const PageId known = cached[g].Of(LevelKind(each));
      if (known == kNoPage || records[g].Of(LevelKind(each)) != kNoPage) continue;
      manager_.pool.Retain(static_cast<int>(g), LevelKind(each), known);
      records[g].Of(LevelKind(each)) = known;
    }
  }
  const auto allocate = [&](int group, PageKind kind) {
    return frees ? manager_.pool.Allocate(group, kind, /*rank=*/0, /*from_reserve=*/true)
                 : manager_.Allocate(group, kind, page);
  };
  const bool done = EncodeLevels(manager_.pool, manager_.encode_levels, manager_.spec.floors, records, level, allocate);
  for (size_t g = 0; g < records.size(); ++g) {
    if (records[g] == PageRef{}) continue;
    PageRef& own = pages_[g][at];
    for (const PageKind kind : kAgedKinds) {
      if (records[g].Of(kind) == own.Of(kind)) continue;
      if (done) {
        own.Of(kind) = records[g].Of(kind);
      } else {
        Drop(static_cast<int>(g), kind, records[g].Of(kind));
      }
    }
    for (int each = 0; done && each < level; ++each)
      Drop(static_cast<int>(g), LevelKind(each), own.Of(LevelKind(each)));
  }
  if (done && !cached.empty()) manager_.prefix->AttachLevels(tokens, salt_, page, level, records, events_);
  manager_.CountDemotion(done, start);
  return done;
}

bool SequenceCache::Demote(std::span<const int32_t> tokens, int64_t page, int level) {
  assert(IsDemotable());
  if (!DemoteRecords(tokens, page, level, /*frees=*/true)) return false;
  AddEvent(events_, {.position = length_, .first_page = page, .end_page = page + 1, .level = level});
  return true;
}

void SequenceCache::Replay(LevelEvents events, int64_t until) {
  assert(PageCount() == 0);
  replay_ = std::move(events);
  next_event_ = 0;
  replay_until_ = until;
}

void SequenceCache::Suspend(std::span<const int32_t> tokens) {
  LevelEvents events = events_;
  events.insert(events.end(), replay_.begin() + static_cast<std::ptrdiff_t>(next_event_), replay_.end());
  const int64_t until = std::max(replay_until_, length_);
  Finish(tokens);
  Replay(std::move(events), until);
}

void SequenceCache::EndReplay() noexcept {
  replay_.clear();
  next_event_ = 0;
  replay_until_ = 0;
  is_replayable_ = false;
}

bool SequenceCache::ReplayEvents(std::span<const int32_t> tokens) {
  for (; next_event_ < replay_.size() && replay_[next_event_].position <= length_; ++next_event_) {
    const LevelEvent& event = replay_[next_event_];
    const int64_t end = std::min(event.end_page, length_ / manager_.spec.page_size);
    for (int64_t page = event.first_page; page < end; ++page) {
      const LevelRecord held = RecordOf(page);
      if (held.record == kNoPage || held.level >= event.level) continue;
      const bool frees = OwnsLevels(page, CachedRecords(tokens, page));
      if (!DemoteRecords(tokens, page, event.level, frees)) return false;
    }
    events_.push_back(event);
  }
  return true;
}

int64_t SequenceCache::MaxBytes(int64_t tokens) const {
  const KvCacheSpec& spec = manager_.spec;
  if (!Replays()) return spec.MaxBytes(tokens);
  const int64_t size = spec.page_size;
  std::vector<int> levels(static_cast<size_t>(tokens / size + 1), 0);
  const auto bytes_at = [&](int64_t position) {
    int64_t bytes = manager_.pool.ReserveBytes();
    for (const KvCacheGroup& group : spec.groups) {
      bytes += group.MaxFirstLevelBytes(position, 1);
      for (int64_t page = 0; group.visibility.IsFull() && page < position / size; ++page) {
        const int level = levels[static_cast<size_t>(page)];
        if (group.IsDemotable(page)) bytes -= group.page_bytes - group.LevelBytes(level);
      }
    }
    return bytes;
  };
  int64_t max_bytes = 0;
  for (const LevelEvent& event : replay_) {
    if (event.position > tokens) break;
    max_bytes = std::max(max_bytes, bytes_at(event.position));
    for (int64_t page = event.first_page; page < std::min(event.end_page, event.position / size); ++page) {
      levels[static_cast<size_t>(page)] = std::max(levels[static_cast<size_t>(page)], event.level);
    }
  }
  return std::max({max_bytes, bytes_at(std::min(tokens, replay_until_)), spec.MaxBytes(tokens)});
}

}  // namespace kvanta::cache
