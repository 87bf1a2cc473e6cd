// Scheduler with continuous batching and chunked prefill. A step contains decoding sequences first (one token each),
// then page-aligned prefill chunks of running sequences, then newly admitted sequences, within a token budget and the
// available pages. When pages run out, the last sequence in the queue is preempted: its pages are freed and it is
// recomputed later (its closed pages may still be in the prefix cache).
//
// A waiting sequence may be prepared: while pages of its prefix are loaded, and until it runs, its memory is reserved.
//
// Progress: the first sequence can preempt all others, and a sequence that does not fit alone is reported as
// unschedulable; so every step either computes tokens or shrinks the set of sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/reservations.h"
#include "scheduler/sequence.h"

namespace kvanta::scheduler {

struct SchedulerConfig {
  int max_sequences = 64;     // maximum running sequences
  int max_step_tokens = 512;  // token budget of a step; >= page_size
  int page_size = 64;
  // Steps that the engine has in flight at once, in a pipeline of ranks. Decoding sequences are spread among them.
  int steps_in_flight = 1;
};

// Tokens [start, start + tokens) of a sequence; their pages are reserved.
struct Chunk {
  Sequence* sequence = nullptr;
  int64_t start = 0;
  int tokens = 0;
  bool last = false;  // ends at the sequence's last token: sample the next one
  int drafts = 0;     // draft tokens that are computed behind it, set by the caller
};

class Scheduler {
 public:
  // `cache` must outlive the scheduler. Throws InputError when max_step_tokens < page_size.
  Scheduler(SchedulerConfig config, cache::KvCacheManager& cache);

  // Enqueues by (priority, arrival). The sequence must stay valid until removed.
  void Add(Sequence& sequence);
  // Removes a sequence from either queue and frees its pages. Not between Schedule and Commit.
  void Remove(Sequence& sequence);

  // Reserves memory for all tokens of a waiting sequence, beside that of those before it. The pages that the
  // cache has of its prefix are held, and Sequence::reservation takes more of them. False if the memory is short.
  // Between steps only; the scheduler ends reservations whose memory is needed by sequences before them.
  bool Prepare(Sequence& sequence);
  void EndPreparation(Sequence& sequence) noexcept { reservations_.End(sequence); }
  // Ends the last preparation of those behind `sequence`, or of all; false if there is none.
  bool EndLastPreparation(const Sequence* sequence = nullptr) noexcept { return reservations_.EndLastBehind(sequence); }
  int64_t Prepared() const noexcept { return reservations_.Count(); }

  // Chunks of the next step, with pages reserved; valid until the next call.
  std::span<const Chunk> Schedule();
  // Draft tokens that may be computed behind a chunk of the last Schedule(). They leave the chunk's last page open, for
  // a closed page is immutable; so they need no further pages, and rejecting them frees none.
  int64_t DraftSlots(const Chunk& chunk) const noexcept;
  // Tokens left in the budget of the last Schedule().
  int64_t BudgetLeft() const noexcept { return budget_; }
  // Sequences that do not fit even alone, found by the last Schedule(): removed from the queues, pages freed.
  std::span<Sequence* const> Unschedulable() const noexcept { return unschedulable_; }
  // Commits the step after its K and V were written to the cache, or will be before those of the steps that follow.
  // Sequences whose last token it has are not scheduled until there is another (Sequence::sampling).
  void Commit();

  // In the order in which they will run; those that are loading or sampling let others pass.
  std::span<Sequence* const> WaitingSequences() const noexcept { return waiting_; }
  int64_t Running() const noexcept { return static_cast<int64_t>(running_.size()); }
  int64_t Waiting() const noexcept { return static_cast<int64_t>(waiting_.size()); }
  int64_t Preemptions() const noexcept { return preemptions_; }
  // Prompt tokens looked up in the prefix cache on admission, and tokens found.
  int64_t PrefixQueries() const noexcept { return prefix_queries_; }
  int64_t PrefixHits() const noexcept { return prefix_hits_; }

 private:
  // State in which a waiting sequence was not admitted or prepared. It is not tried again until the state improves.
  struct Blocked {
    const Sequence* sequence = nullptr;
    int64_t running = 0, prefix_pages = 0, available_bytes = 0;

    bool NoBetterThan(const Blocked& before) const noexcept {
      return sequence == before.sequence && running == before.running && prefix_pages == before.prefix_pages &&
             available_bytes <= before.available_bytes;
    }
  };

  // Removes the first waiting sequence that may be admitted; null if there is none.
  Sequence* TakeWaiting();
  Blocked StateOf(const Sequence& sequence) const noexcept;
  bool HasPromptChunk() const;
  int64_t ChunkTokens(const Sequence& sequence, int64_t budget) const;
  bool ReserveOrPreempt(Sequence& sequence, int64_t& tokens);
  void ScheduleRunning(bool decodes);
  bool Admit(Sequence& sequence);
  void Preempt(Sequence& sequence);
  void Refuse(Sequence& sequence);
  void Append(Sequence& sequence, int64_t tokens);

  SchedulerConfig config_;
  cache::KvCacheManager& cache_;
  Reservations reservations_;
  std::vector<Sequence*> running_;  // both queues are sorted by (priority, arrival)
  std::vector<Sequence*> waiting_;
  std::vector<Chunk> chunks_;
  std::vector<Sequence*> unschedulable_;
  int64_t budget_ = 0;  // tokens left in the step
  Blocked blocked_;     // admission
  Blocked blocked_prepare_;
  int64_t arrivals_ = 0;
  int64_t preemptions_ = 0;
  int64_t prefix_queries_ = 0;
  int64_t prefix_hits_ = 0;
};

}  // namespace kvanta::scheduler
