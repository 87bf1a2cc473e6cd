// Precision by pressure (docs/pressure.md): which pages of running sequences are demoted when memory is short.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/sequence.h"

namespace kvanta::scheduler {

class Demotions {
 public:
  // `cache` must outlive the object.
  explicit Demotions(cache::KvCacheManager& cache) : cache_(cache) {}

  // Demotes pages of `sequences`, in queue order, until `bytes` more are free: of the last sequences and, in each, the
  // oldest pages first; a page that several share with that of the first of them, for all. All pages are demoted by one
  // level before any is by the next. False if no page could be.
  bool Free(std::span<Sequence* const> sequences, int64_t bytes);

 private:
  bool Demote(std::span<Sequence* const> sequences, size_t owner, int64_t page);

  cache::KvCacheManager& cache_;
  std::vector<Sequence*> holders_;  // scratch
};

}  // namespace kvanta::scheduler
