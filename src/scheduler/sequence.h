// Scheduler state of a sequence: tokens, pages and queue order.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cache/sequence_cache.h"

namespace kvanta::scheduler {

struct Sequence {
  Sequence(cache::KvCacheManager& cache, std::string salt) : pages(cache, std::move(salt)) {}

  std::vector<int32_t> tokens;     // prompt and output
  int64_t arrival = 0;             // order of Add; set by the scheduler
  int priority = 0;                // smaller runs first
  bool skip_prefix_match = false;  // compute every token, because its logits are requested
  bool loading = false;            // waits for pages of its prefix: not admitted yet
  bool sampling = false;           // a step that has not ended samples behind its last token: not scheduled until then
  int64_t cached_tokens = -1;      // prefix cache hit at the first admission; -1: not admitted yet
  int preemptions = 0;
  cache::SequenceCache pages;

  int64_t Remaining() const noexcept { return static_cast<int64_t>(tokens.size()) - pages.Length(); }
};

}  // namespace kvanta::scheduler
