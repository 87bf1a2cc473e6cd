// Scheduler state of a sequence: tokens, pages and queue order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/held_records.h"
#include "cache/sequence_cache.h"

namespace kvanta::scheduler {

// Memory of a waiting sequence, from when its stored prefix is loaded until it runs.
struct Reservation {
  int64_t bytes = 0;        // of all its tokens
  cache::HeldRecords held;  // the part of `bytes` that is in memory

  Reservation(int64_t token_bytes, cache::PagePool& pool) noexcept : bytes(token_bytes), held(pool) {}

  // Bytes that nobody else may take.
  int64_t Pending() const noexcept { return std::max<int64_t>(0, bytes - held.Bytes()); }
};

struct Sequence {
  Sequence(cache::KvCacheManager& cache, std::string salt) : pages(cache, std::move(salt)) {}

  std::vector<int32_t> tokens;     // prompt and output
  int64_t arrival = 0;             // order of Add; set by the scheduler
  int priority = 0;                // smaller runs first
  double added = 0;                // when it began to wait, in seconds of the clock of Schedule()
  std::string user;                // who shares steps with others, with SchedulerConfig::fair
  bool logits_of_prompt = false;   // logits of every prompt token are requested
  bool skip_prefix_match = false;  // compute every token, because its logits are requested
  bool loading = false;            // waits for pages of its prefix: not admitted yet, and lets others pass
  bool awaits_memory = false;      // loading, and its memory cannot be reserved yet: lets nobody pass
  bool answered = false;           // tokens of it were given out: their bits stay when it is computed again
  bool running = false;            // set by the scheduler: it has pages, or will have with the step
  bool sampling = false;           // a step that has not ended samples its next token: not scheduled until then
  int64_t prefix_tokens = 0;       // cached ones when it began to wait: they need not be computed; set by the scheduler
  int64_t cached_tokens = -1;      // prefix cache hit at the first admission; -1: not admitted yet
  int preemptions = 0;
  cache::SequenceCache pages;
  std::optional<Reservation> reservation;  // made and ended by the scheduler

  int64_t Remaining() const noexcept { return static_cast<int64_t>(tokens.size()) - pages.Length(); }
  // Tokens to compute, for which Remaining() of a waiting sequence counts its cached ones as well.
  int64_t Uncached() const noexcept {
    return static_cast<int64_t>(tokens.size()) - std::max(pages.Length(), prefix_tokens);
  }
};

// Order of both queues of the scheduler.
inline bool RunsBefore(const Sequence& a, const Sequence& b) noexcept {
  return a.priority != b.priority ? a.priority < b.priority : a.arrival < b.arrival;
}

}  // namespace kvanta::scheduler
