#include "store/record_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "cache/prefix_hit.h"
#include "cache/record_listener.h"
#include "store/file_system.h"

namespace kvanta::store {
namespace {

constexpr int64_t kReadBatchBytes = int64_t{8} << 20;

}  // namespace

RecordMemory::RecordMemory(std::shared_ptr<HostArena> arena, cache::KvCacheSpec spec)
    : arena_(std::move(arena)), spec_(std::move(spec)) {}

std::string RecordMemory::Name() const {
  return fmt::format("kv_offload_bytes = {}", arena_->Bytes());
}

int64_t RecordMemory::BatchBytes() const noexcept {
  return kReadBatchBytes;
}

Buffer RecordMemory::Allocate(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  for (;;) {
    if (Buffer block = arena_->Allocate(bytes)) return block;
    if (!EvictOne()) return {};
  }
}

bool RecordMemory::IsKnown(const RecordId& id) const {
  const std::lock_guard lock(mutex_);
  return entries_.contains(id);
}

void RecordMemory::Describe(CacheTierStats& stats) const {
  const std::lock_guard lock(mutex_);
  stats.enabled = true;
  stats.files = std::ssize(entries_);
  stats.bytes = stats.own_bytes = arena_->UsedBytes();
  stats.limit_bytes = arena_->Bytes();
  stats.evictions = evictions_;
  stats.dropped_records = refused_;
}

// ---- order of use

// True for records that hits on later pages need, too.
bool RecordMemory::IsNeeded(const Entry& entry) const {
  const RecordId& id = entry.use.id;
  return !cache::IsDroppable(spec_.groups[static_cast<size_t>(id.group)], entry.use.index, id.kind);
}

bool RecordMemory::CanGo(const Entry& entry) const {
  return !IsNeeded(entry) || !continuations_.contains(entry.use.id.key);
}

template <class Change>
void RecordMemory::ForNeededRecords(const PageKey& page, Change change) {
  for (int group = 0; group < static_cast<int>(spec_.groups.size()); ++group) {
    for (const cache::PageKind kind : cache::kPageKinds) {
      const auto found = entries_.find({page, group, kind});
      if (found != entries_.end() && IsNeeded(found->second)) change(found->second);
    }
  }
}

void RecordMemory::SetOrdered(Entry& entry, bool ordered) noexcept {
  if (ordered != static_cast<bool>(entry.place)) return;  // it has its node while it is not in order_
  if (ordered) {
    entry.place.value() = {entry.pinned_until_ns, entry.used, &entry};
    order_.insert(std::move(entry.place));
  } else {
    entry.place = order_.extract({entry.pinned_until_ns, entry.used, &entry});
  }
}

void RecordMemory::SetUse(Entry& entry, uint64_t used, int64_t pinned_until_ns) noexcept {
  const bool ordered = !entry.place;
  SetOrdered(entry, false);
  entry.used = used;
  entry.pinned_until_ns = pinned_until_ns;
  SetOrdered(entry, ordered);
}

void RecordMemory::ExpirePins(int64_t now_ns) {
  while (!pins_.empty() && pins_.begin()->first <= now_ns) {
    Entry& entry = *pins_.begin()->second;
    pins_.erase(pins_.begin());
    pinned_bytes_ -= entry.Bytes();
    SetUse(entry, entry.used, 0);
  }
}

// ---- records

void RecordMemory::Insert(const RecordToWrite& record) {
  if (entries_.contains(record.use.id)) return;
  std::set<Order> place = {Order()};
  Entry& entry = entries_
                     .emplace(record.use.id, Entry{.use = record.use,
                                                   .content = record.content,
                                                   .used = clock_ + 1,
                                                   .place = place.extract(place.begin())})
                     .first->second;
  if (IsNeeded(entry) && entry.use.index > 0) {
    int64_t* count = nullptr;
    try {
      count = &continuations_[entry.content->parent];
    } catch (...) {
      entries_.erase(record.use.id);
      throw;
    }
    if (++*count == 1) {
      ForNeededRecords(entry.content->parent, [this](Entry& before) { SetOrdered(before, false); });
    }
  }
  ++clock_;
  SetOrdered(entry, CanGo(entry));
}

// A page that has lost its last successor is at most as old as that one: whatever used the successor used it as well.
void RecordMemory::Erase(Entry& entry) noexcept {
  SetOrdered(entry, false);
  if (entry.pinned_until_ns != 0) {
    pins_.erase({entry.pinned_until_ns, &entry});
    pinned_bytes_ -= entry.Bytes();
  }
  if (IsNeeded(entry) && entry.use.index > 0) {
    const auto count = continuations_.find(entry.content->parent);
    if (--count->second == 0) {
      continuations_.erase(count);
      ForNeededRecords(entry.content->parent, [&](Entry& before) {
        SetUse(before, std::max(before.used, entry.used), before.pinned_until_ns);
        SetOrdered(before, true);
      });
    }
  }
  const RecordId id = entry.use.id;
  entries_.erase(id);
}

// Evicts the first record that nobody reads or writes at the moment: others would give no memory back.
bool RecordMemory::EvictOne() {
  ExpirePins(WallClockNs());
  for (const Order& place : order_) {
    Entry& entry = *std::get<Entry*>(place);
    if (entry.content.use_count() > 1) continue;
    Erase(entry);
    ++evictions_;
    return true;
  }
  return false;
}

WriteResult RecordMemory::Write(std::span<const RecordToWrite> records) {
  WriteResult result;
  const std::lock_guard lock(mutex_);
  for (const RecordToWrite& record : records) {
    if (arena_->Owns(record.content->payload)) {
      Insert(record);
      result.bytes += std::ssize(record.content->Payload());
    } else {
      ++refused_;
    }
  }
  return result;
}

void RecordMemory::Touch(std::span<const RecordUse> records) {
  const std::lock_guard lock(mutex_);
  for (const RecordUse& use : records) {
    const auto found = entries_.find(use.id);
    if (found != entries_.end()) SetUse(found->second, ++clock_, found->second.pinned_until_ns);
  }
}

void RecordMemory::Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) {
  const std::lock_guard lock(mutex_);
  ExpirePins(WallClockNs());
  for (size_t i = 0; i < records.size(); ++i) {
    const auto found = entries_.find(records[i].id);
    if (found == entries_.end()) continue;
    Entry& entry = found->second;
    if (entry.pinned_until_ns >= until_ns[i]) continue;
    const int64_t bytes = entry.pinned_until_ns == 0 ? entry.Bytes() : 0;
    if (pinned_bytes_ + bytes > cache::MaxPinnedBytes(arena_->Bytes())) continue;
    pins_.emplace(until_ns[i], &entry);
    pins_.erase({entry.pinned_until_ns, &entry});
    pinned_bytes_ += bytes;
    SetUse(entry, ++clock_, until_ns[i]);
  }
}

void RecordMemory::Remove(std::span<const RecordId> ids) {
  const std::lock_guard lock(mutex_);
  for (const RecordId& id : ids) {
    const auto found = entries_.find(id);
    if (found != entries_.end()) Erase(found->second);
  }
}

// Records that are found count as used: the request that asks for them may have to wait before it reads them.
std::string RecordMemory::Find(std::span<const RecordId> ids, std::span<uint8_t> found) {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto at = entries_.find(ids[i]);
    if (at == entries_.end()) continue;
    found[i] = 1;
    if (IsNeeded(at->second)) SetUse(at->second, ++clock_, at->second.pinned_until_ns);
  }
  return {};
}

std::vector<ReadResult> RecordMemory::Read(std::span<const RecordId> ids) {
  std::vector<ReadResult> results(ids.size());
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto found = entries_.find(ids[i]);
    if (found == entries_.end()) continue;
    results[i].outcome = ReadResult::Outcome::kRead;
    results[i].content = found->second.content;
  }
  return results;
}

}  // namespace kvanta::store
