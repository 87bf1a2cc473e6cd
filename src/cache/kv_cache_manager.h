// KV cache manager: the page pool and prefix cache that all sequences share. Not thread-safe.
#pragma once

#include <algorithm>
#include <optional>
#include <span>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "cache/kv_cache_spec.h"
#include "cache/level_encoder.h"
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

  // Bytes available to a sequence: unused bytes plus bytes that eviction and demotion would free, on the fullest rank.
  int64_t AvailableBytes() const noexcept { return pool.AvailableBytes() + DemotableBytes(); }
  // Bytes that demotion of pages in use would free. Open pages, which it would not free, count as closed ones.
  int64_t DemotableBytes() const noexcept {
    int64_t bytes = 0;
    for (int g = 0; spec.floors != 0 && g < static_cast<int>(spec.groups.size()); ++g) {
      const KvCacheGroup& group = spec.groups[static_cast<size_t>(g)];
      for (int level = 0; level < group.ages.floors; ++level) {
        const int64_t pages = pool.UsedPages(g, LevelKind(level)) - pool.EvictablePages(g, LevelKind(level));
        bytes += pages * (level == 0 ? group.page_bytes - group.FloorBytes() : group.age_bytes[0]);
      }
    }
    return bytes;
  }

  // Allocates a record of page `index` of a sequence with one reference, demoting and evicting prefixes that nobody
  // uses as needed, while there are at least `min_evictable` evictable bytes. kNoPage if there is no memory for the
  // record.
  PageId Allocate(int group, PageKind kind, int64_t index, int64_t min_evictable = 0) {
    const int rank = pool.RankOfPage(group, index);
    PageId page = pool.Allocate(group, kind, rank);
    while (page == kNoPage && prefix && pool.EvictableBytes() >= min_evictable &&
           (DemotePrefix() || prefix->EvictOne())) {
      page = pool.Allocate(group, kind, rank);
    }
    return page;
  }

  // Demotes a page that nobody uses; false if there is none above the floor, or its time is spent: evicting the page
  // costs nothing, and nobody knows whether a request will find it.
  bool DemotePrefix() {
    if (spec.floors == 0 || !encode_levels) return false;
    const double start = clock();
    prefix_seconds_ = std::min(kSavedPrefixSeconds, prefix_seconds_ + kPrefixShare * (start - prefix_time_));
    prefix_time_ = start;
    if (prefix_seconds_ <= 0) return false;
    const bool done = prefix->DemoteOne(encode_levels);
    prefix_seconds_ -= CountDemotion(done, start);
    return done;
  }
  // Counts a demotion that began at `start`; returns its seconds.
  double CountDemotion(bool done, double start) noexcept {
    const double seconds = clock() - start;
    demotions += done ? 1 : 0;
    demotion_seconds += seconds;
    return seconds;
  }

  const KvCacheSpec spec;
  PagePool pool;
  std::optional<PrefixCache> prefix;  // empty if prefix caching is off
  ThreadPool* threads;
  LevelEncoder encode_levels;  // empty: nothing is demoted
  Clock clock = Now;
  int64_t demotions = 0;  // pages
  double demotion_seconds = 0;

 private:
  // Time for demoting prefixes that nobody uses: a share of all time, and what was saved of it.
  static constexpr double kPrefixShare = 0.02;
  static constexpr double kSavedPrefixSeconds = 1;
  double prefix_seconds_ = kSavedPrefixSeconds;
  double prefix_time_ = clock();
};

}  // namespace kvanta::cache
