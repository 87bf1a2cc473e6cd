// Log of the changes of the prefix cache: a bounded queue between the engine's steps and whoever publishes them. A full
// queue never delays a step; the log then begins again with all pages that are in the cache.
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "cache/record_listener.h"
#include "kvanta/kv_events.h"

namespace kvanta::engine {

class KvEventLog final : public cache::RecordListener {
 public:
  // capacity: events; at least 1. The first event is kCleared: whoever knows pages of an earlier process on the same
  // address drops them.
  explicit KvEventLog(size_t capacity);
  ~KvEventLog() override;
  KvEventLog(const KvEventLog&) = delete;
  KvEventLog& operator=(const KvEventLog&) = delete;

  // Begins to listen to an empty prefix cache, which outlives the log. identity: as StoreTiers', so that both give
  // pages the same keys.
  void Attach(cache::KvCacheManager& cache, std::string_view identity);

  cache::PageKey RootKey(std::string_view salt) override;
  cache::PageKey ChildKey(const cache::PageKey& parent, std::span<const int32_t> tokens) override;
  void OnAttach(const cache::CachedRecord& record) noexcept override;
  void OnUse(const cache::CachedRecord& /*record*/) noexcept override {}
  void OnDrop(const cache::CachedRecord& /*record*/) noexcept override {}  // OnRelease follows
  void OnPin(const cache::CachedRecord& /*record*/, double /*seconds*/) noexcept override {}
  void OnRelease(const cache::CachedRecord& record) noexcept override;

  // Replaces what is queued by one kCleared: the cache is empty.
  void Clear() noexcept;

  // The queued events, the oldest first; waits at most `seconds` for one. None: events were lost, Restart() is due.
  // Any thread.
  std::optional<std::vector<KvEvent>> Take(double seconds);
  // With the cache unchanged meanwhile: kCleared and all pages of the cache, in place of what was queued and lost.
  std::vector<KvEvent> Restart();
  // All pages of the cache, parents first. With the cache unchanged meanwhile.
  std::vector<KvEvent> Pages() const;

 private:
  bool Announces(const cache::CachedRecord& record) const noexcept;
  void Push(KvEvent event);
  template <class Make>
  void Log(Make make) noexcept;

  const size_t capacity_;
  cache::KvCacheManager* cache_ = nullptr;
  cache::PageKey identity_ = {};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<KvEvent> events_;  // guarded by the mutex, as the next
  bool lost_ = false;
};

}  // namespace kvanta::engine
