// One cache: what every sequence of it shares. Not thread-safe: one owner drives it.
#pragma once

#include <optional>
#include <span>

#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"
#include "cache/prefix_cache.h"

namespace kvanta::cache {

struct KvCacheManager {
  // layers: each layer's visibility; empty: full. Throws InputError as PagePool does.
  KvCacheManager(Device& device, const formats::CacheLayout& layout, std::span<const Visibility> layers,
                 PagePoolConfig config, bool prefix_caching)
      : spec(layout, layers), pool(device, layout, config) {
    if (prefix_caching) prefix.emplace(pool, spec);
  }

  // Bytes that a sequence could get: unused ones, and those that eviction would free.
  int64_t AvailableBytes() const noexcept { return pool.BudgetBytes() - pool.UsedBytes() + pool.EvictableBytes(); }

  const KvCacheSpec spec;
  PagePool pool;
  std::optional<PrefixCache> prefix;  // none without prefix caching
};

}  // namespace kvanta::cache
