// KV cache manager: the page pool and prefix cache that all sequences share. Not thread-safe.
#pragma once

#include <optional>
#include <span>

#include "base/thread_pool.h"
#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"
#include "cache/prefix_cache.h"

namespace kvanta::cache {

struct KvCacheManager {
  // layers: visibility per layer; empty: full. state_threads: round the states of recurrent layers; null: the caller's
  // thread does. Throws InputError as PagePool does.
  KvCacheManager(Device& device, const formats::CacheLayout& layout, std::span<const Visibility> layers,
                 PagePoolConfig config, bool prefix_caching, ThreadPool* state_threads = nullptr)
      : spec(layout, layers, config.ranks), pool(device, layout, config), threads(state_threads) {
    if (prefix_caching) prefix.emplace(pool, spec);
  }

  // Bytes available to a sequence: unused bytes plus bytes that eviction would free, on the fullest rank.
  int64_t AvailableBytes() const noexcept { return pool.AvailableBytes(); }

  // Allocates a record of page `index` of a sequence with one reference, evicting from the prefix cache as needed,
  // while it has at least `min_evictable` evictable bytes. kNoPage if there is no memory for the record.
  PageId Allocate(int group, PageKind kind, int64_t index, int64_t min_evictable = 0) {
    const int rank = pool.RankOfPage(index);
    PageId page = pool.Allocate(group, kind, rank);
    while (page == kNoPage && prefix && pool.EvictableBytes() >= min_evictable && prefix->EvictOne()) {
      page = pool.Allocate(group, kind, rank);
    }
    return page;
  }

  const KvCacheSpec spec;
  PagePool pool;
  std::optional<PrefixCache> prefix;  // empty if prefix caching is off
  ThreadPool* threads;
};

}  // namespace kvanta::cache
