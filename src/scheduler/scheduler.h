// Decides what a step computes: decoding sequences first (one token each), then page-aligned chunks of prompts, then
// newcomers, within a token budget and the pages there are. When pages run out, the sequence that is last in line is
// preempted: its pages go, and it is computed again later (its closed pages may still be in the prefix tree).
//
// Progress: the first in line can take every page of the others, and a sequence that does not fit alone is handed back
// as unschedulable; so every step either computes tokens or shrinks the set of sequences.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/sequence.h"

namespace kvanta::scheduler {

struct SchedulerConfig {
  int max_sequences = 64;     // running at once
  int max_step_tokens = 512;  // at least page_size
  int page_size = 64;
};

// tokens [start, start + tokens) of a sequence, whose pages are reserved.
struct Chunk {
  Sequence* sequence = nullptr;
  int64_t start = 0;
  int tokens = 0;
  bool last = false;  // reaches the sequence's last token: the next one can be sampled
};

class Scheduler {
 public:
  // `cache` must outlive the scheduler. Throws InputError when max_step_tokens < page_size.
  Scheduler(SchedulerConfig config, cache::KvCacheManager& cache);

  // Queues by (priority, arrival). The sequence must outlive its stay.
  void Add(Sequence& sequence);
  // Takes a sequence out, wherever it is, and frees its pages at once. Not between Schedule and Commit.
  void Remove(Sequence& sequence);

  // The next step; valid until the next call. Every chunk's pages are reserved.
  std::span<const Chunk> Schedule();
  // Sequences that no amount of waiting can make fit; out of the queues, pages freed. Filled by Schedule().
  std::span<Sequence* const> Unschedulable() const noexcept { return unschedulable_; }
  // The step's K and V are in the cache.
  void Commit();

  int64_t Running() const noexcept { return static_cast<int64_t>(running_.size()); }
  int64_t Waiting() const noexcept { return static_cast<int64_t>(waiting_.size()); }
  int64_t Preemptions() const noexcept { return preemptions_; }
  // Tokens of newcomers that were looked up in the prefix tree, and those found.
  int64_t PrefixQueries() const noexcept { return prefix_queries_; }
  int64_t PrefixHits() const noexcept { return prefix_hits_; }

 private:
  // The state in which the first in line was not admitted; while it gets no better, nothing is looked up again.
  struct Blocked {
    const Sequence* sequence = nullptr;
    int64_t running = 0, prefix_pages = 0, available_bytes = 0;

    bool NoBetterThan(const Blocked& before) const noexcept {
      return sequence == before.sequence && running == before.running && prefix_pages == before.prefix_pages &&
             available_bytes <= before.available_bytes;
    }
  };

  Blocked StateOf(const Sequence& sequence) const noexcept;
  bool HasPromptChunk() const;
  int64_t ChunkTokens(const Sequence& sequence, int64_t budget) const;
  bool ReserveOrPreempt(Sequence& sequence, int64_t& tokens);
  void ScheduleRunning(bool decodes);
  bool Admit(Sequence& sequence);
  void Preempt(Sequence& sequence);
  void Append(Sequence& sequence, int64_t tokens);

  SchedulerConfig config_;
  cache::KvCacheManager& cache_;
  std::vector<Sequence*> running_;  // both sorted by (priority, arrival)
  std::vector<Sequence*> waiting_;
  std::vector<Chunk> chunks_;
  std::vector<Sequence*> unschedulable_;
  int64_t budget_ = 0;  // tokens left in the step
  Blocked blocked_;
  int64_t arrivals_ = 0;
  int64_t preemptions_ = 0;
  int64_t prefix_queries_ = 0;
  int64_t prefix_hits_ = 0;
};

}  // namespace kvanta::scheduler
