#include "engine/kv_event_log.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "store/page_file.h"

namespace kvanta::engine {
namespace {

// The last 8 bytes of the key, big endian, as vLLM shortens its hashes.
uint64_t BlockHash(const cache::PageKey& key) noexcept {
  uint64_t hash = 0;
  for (size_t i = key.size() - sizeof(hash); i < key.size(); ++i) hash = hash << 8U | key[i];
  return hash;
}

KvEvent Stored(const cache::CachedRecord& record) {
  KvEvent event{.kind = KvEventKind::kStored,
                .group = record.group,
                .block_hash = BlockHash(record.key),
                .parent_block_hash = {},
                .tokens = {record.tokens.begin(), record.tokens.end()},
                .cache_salt = std::string(record.salt)};
  if (record.parent != nullptr) event.parent_block_hash = BlockHash(*record.parent);
  return event;
}

}  // namespace

KvEventLog::KvEventLog(size_t capacity) : capacity_(capacity) {
  Push({});
}

KvEventLog::~KvEventLog() {
  if (cache_ != nullptr) cache_->prefix->RemoveListener(*this);
}

void KvEventLog::Attach(cache::KvCacheManager& cache, std::string_view identity) {
  identity_ = store::IdentityKey(identity);
  cache.prefix->AddListener(*this);
  cache_ = &cache;
}

cache::PageKey KvEventLog::RootKey(std::string_view salt) {
  return store::RootKey(identity_, salt);
}

cache::PageKey KvEventLog::ChildKey(const cache::PageKey& parent, std::span<const int32_t> tokens) {
  return store::ChildKey(parent, tokens);
}

// One record of a page and group stands for the page: the quantized one, or the exact one of a page that has no other.
// With precision by age, a page is announced with the first record of a level, and gone with the last one.
bool KvEventLog::Announces(const cache::CachedRecord& record) const noexcept {
  const cache::KvCacheGroup& group = cache_->spec.groups[static_cast<size_t>(record.group)];
  const bool quantized = group.NeedsQuantized(record.index, true);
  const cache::PageKind first = quantized ? cache::PageKind::kQuantized : cache::PageKind::kExact;
  return std::ranges::all_of(cache::kPageKinds, [&](cache::PageKind kind) {
    const bool stands = kind == first || IsAged(kind);
    return kind == record.kind ? stands : !stands || record.records.Of(kind) == cache::kNoPage;
  });
}

void KvEventLog::OnAttach(const cache::CachedRecord& record) noexcept {
  if (Announces(record)) Log([&] { return Stored(record); });
}

void KvEventLog::OnRelease(const cache::CachedRecord& record) noexcept {
  if (!Announces(record)) return;
  Log([&] {
    return KvEvent{.kind = KvEventKind::kRemoved, .group = record.group, .block_hash = BlockHash(record.key)};
  });
}

template <class Make>
void KvEventLog::Log(Make make) noexcept {
  try {
    Push(make());
  } catch (const std::exception&) {  // no memory
    const std::lock_guard lock(mutex_);
    lost_ = true;
  }
}

void KvEventLog::Push(KvEvent event) {
  const std::lock_guard lock(mutex_);
  if (lost_) return;
  if (events_.size() == capacity_) {
    lost_ = true;
    events_.clear();
  } else {
    events_.push_back(std::move(event));
  }
  changed_.notify_one();
}

void KvEventLog::Clear() noexcept {
  {
    const std::lock_guard lock(mutex_);
    lost_ = false;
    events_.clear();
  }
  Log([] { return KvEvent(); });
}

std::optional<std::vector<KvEvent>> KvEventLog::Take(double seconds) {
  constexpr double kMaxSeconds = 1e9;  // the clock counts nanoseconds in 64 bits
  const std::chrono::duration<double> limit(std::clamp(seconds, 0.0, kMaxSeconds));
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return lost_ || !events_.empty(); });
  if (lost_) return std::nullopt;
  return std::exchange(events_, {});
}

std::vector<KvEvent> KvEventLog::Restart() {
  std::vector<KvEvent> events = Pages();
  events.insert(events.begin(), KvEvent{});
  const std::lock_guard lock(mutex_);
  events_.clear();
  lost_ = false;
  return events;
}

std::vector<KvEvent> KvEventLog::Pages() const {
  std::vector<KvEvent> events;
  if (cache_ == nullptr) return events;
  cache_->prefix->VisitRecords([&](const cache::CachedRecord& record) {
    if (Announces(record)) events.push_back(Stored(record));
  });
  return events;
}

}  // namespace kvanta::engine
