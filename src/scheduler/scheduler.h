// Scheduler with continuous batching and chunked prefill. A step contains decoding sequences first (one token each),
// then chunks of prompts, within a budget of tokens and of time and the available pages. When pages run out, of the
// sequences that are later in the queue, the one with least to compute again is preempted: its pages are freed and it
// is recomputed later (its closed pages may still be in the prefix cache). With precision by pressure, pages are
// demoted first (demotions.h).
//
// With a clock, steps end in time for the streams that wait for their next token, and prompts share them
// (prompt_order.h). Without one, chunks are page-aligned, and prompts run in the order of the queue. Results do not
// depend on how a prompt is divided.
//
// A waiting sequence may be prepared: while pages of its prefix are loaded, and until it runs, its memory is reserved.
//
// Progress: the first sequence can preempt all others, and a sequence that does not fit alone is reported as
// unschedulable; so every step either computes tokens or shrinks the set of sequences.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "cache/kv_cache_manager.h"
#include "scheduler/demotions.h"
#include "scheduler/prompt_order.h"
#include "scheduler/reservations.h"
#include "scheduler/sequence.h"
#include "scheduler/step_time_model.h"

namespace kvanta::scheduler {

struct SchedulerConfig {
  int max_sequences = 64;     // maximum running sequences
  int max_step_tokens = 512;  // token budget of a step; >= page_size
  int page_size = 64;
  // A step computes all tokens of a sequence, of at most max_step_tokens, or none. It is not limited by time, by
  // long_prompt_tokens, or by memory but for the sequences that run.
  bool whole_sequences = false;
  // Steps that the engine has in flight at once, in a pipeline of ranks. Decoding sequences are spread among them.
  int steps_in_flight = 1;
  // Seconds that a step may take while a sequence decodes; four times as many while none does, so that a prompt that
  // comes is soon looked at. 0: twice what the step takes without prompts, or 40 ms more than that; and without
  // sequences that decode 0.4 s, or eight times what a step of one token takes. The larger counts.
  double max_step_seconds = 0;
  PromptOrderConfig prompts = {};
  // Prompts that are computed at the same time, as in vLLM; 0: any number. Prompts of more tokens than
  // long_prompt_tokens are long (0: none is), and a step computes at most so many tokens of them.
  int max_partial_prompts = 0, max_long_partial_prompts = 0;
  int64_t long_prompt_tokens = 0;
};

// The time at which a step is scheduled, for Scheduler::Schedule.
struct StepClock {
  double now = 0;    // seconds
  double spent = 0;  // of the step's time: on what came before
};

// Tokens [start, start + tokens) of a sequence; their pages are reserved.
struct Chunk {
  Sequence* sequence = nullptr;
  int64_t start = 0;
  int tokens = 0;
  bool last = false;       // ends at the sequence's last token: sample the next one
  int drafts = 0;          // draft tokens that are computed after it, set by the caller
  double seconds = 0;      // predicted, in addition to what the step has without it
  bool is_prompt = false;  // not the next token alone
};

class Scheduler {
 public:
  // `cache` must outlive the scheduler. Throws InputError when max_step_tokens < page_size.
  Scheduler(SchedulerConfig config, cache::KvCacheManager& cache);

  // Enqueues by (priority, arrival). The sequence must stay valid until removed.
  void Add(Sequence& sequence);
  // Removes a sequence from either queue and frees its pages. Not between Schedule and Commit.
  void Remove(Sequence& sequence);

  // Reserves memory for all tokens of a waiting sequence, in addition to that of the sequences before it. The pages
  // that the cache has of its prefix are held, and Sequence::reservation takes more of them. False if the memory is
  // short. Between steps only; the scheduler ends reservations whose memory is needed by sequences before them.
  bool Prepare(Sequence& sequence);
  void EndPreparation(Sequence& sequence) noexcept { reservations_.End(sequence); }
  // Ends the last preparation of those after `sequence`, or of all; false if there is none.
  bool EndLastPreparation(const Sequence* sequence = nullptr) noexcept { return reservations_.EndLastBehind(sequence); }
  int64_t Prepared() const noexcept { return reservations_.Count(); }

  // Chunks of the next step, with pages reserved; valid until the next call. Without a clock, its time is not limited.
  std::span<const Chunk> Schedule(const std::optional<StepClock>& clock = {});
  // Predicts what steps take. The caller records every step.
  StepTimeModel& TimeModel() noexcept { return times_; }
  // Draft tokens that may be computed after a chunk of the last Schedule(). They leave the chunk's last page open, for
  // a closed page is immutable; so they need no further pages, and rejecting them frees none.
  int64_t DraftSlots(const Chunk& chunk) const noexcept;
  // Tokens left in the budget of the last Schedule().
  int64_t BudgetLeft() const noexcept { return budget_; }
  // The most rows that the last Schedule() leaves time for, each with logits, for drafts of decoding sequences.
  int64_t DraftRowsLeft() const noexcept;
  // Sequences that do not fit even alone, found by the last Schedule(): removed from the queues, pages freed.
  std::span<Sequence* const> Unschedulable() const noexcept { return unschedulable_; }
  // Commits the step after its K and V were written to the cache, or will be before those of the steps that follow.
  // Sequences whose last token it has are not scheduled until there is another (Sequence::sampling).
  void Commit();

  // Charges the user of a sequence for draft tokens that were accepted, in addition to the token of its chunk.
  void ChargeDrafts(const Sequence& sequence, int64_t accepted) noexcept {
    order_.Charge(sequence, accepted, 0, /*is_prompt=*/false);
  }

  // In the order in which they will run; those that are loading or sampling let others pass.
  std::span<Sequence* const> WaitingSequences() const noexcept { return waiting_; }
  int64_t Running() const noexcept { return static_cast<int64_t>(running_.size()); }
  int64_t Waiting() const noexcept { return static_cast<int64_t>(waiting_.size()); }
  int64_t Preemptions() const noexcept { return preemptions_; }
  // Seconds that one token of a prompt takes, as predicted; 0: not known.
  double PromptTokenSeconds() const noexcept;
  // Seconds that the prompts of both queues take, as predicted: what a prompt that comes now may have to wait.
  double PromptSecondsLeft() const noexcept;
  // Prompt tokens looked up in the prefix cache on admission, and tokens found.
  int64_t PrefixQueries() const noexcept { return prefix_queries_; }
  int64_t PrefixHits() const noexcept { return prefix_hits_; }

 private:
  static constexpr double kNoLimit = std::numeric_limits<double>::infinity();

  // State in which a waiting sequence was not admitted or prepared. It is not tried again until the state improves.
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
  int64_t ChunkTokens(const Sequence& sequence) const;
  template <class AddWork>
  int64_t InTime(int64_t fits, int64_t limit, AddWork add) const;
  int64_t TokensInTime(const Sequence& sequence, int64_t limit) const;
  int64_t LogitRows(const Sequence& sequence, int64_t tokens) const noexcept;
  bool IsPartial(const Sequence& sequence) const noexcept;
  bool IsLong(const Sequence& sequence) const noexcept;
  bool MayStart(const Sequence& sequence) const noexcept;
  bool ReserveOrPreempt(Sequence& sequence, int64_t& tokens);
  bool Reserve(Sequence& sequence, int64_t tokens);
  bool Demote(Sequence& sequence, int64_t tokens);
  bool Fits(Sequence& sequence) const;
  void ScheduleDecodes();
  void LimitTime(const StepClock& clock);
  // seconds_ less the time of demotions since the step began to be scheduled.
  double SecondsLeft() const noexcept { return seconds_ - (cache_.demotion_seconds - demotion_seconds_); }
  double PromptSeconds(int64_t start, int64_t tokens) const noexcept;
  void SchedulePrompts(const std::optional<StepClock>& clock, int64_t preemptions);
  void ScheduleRunning(Sequence& sequence);
  bool TryAdmit(Sequence& sequence);
  bool Admit(Sequence& sequence);
  Sequence& Cheapest(Sequence& sequence) const noexcept;
  void Preempt(Sequence& sequence);
  void Wait(Sequence& sequence);
  void Refuse(Sequence& sequence);
  void Append(Sequence& sequence, int64_t tokens);

  SchedulerConfig config_;
  cache::KvCacheManager& cache_;
  Reservations reservations_;
  Demotions demotions_;
  StepTimeModel times_;
  PromptOrder order_;
  std::vector<Sequence*> running_;  // both queues are sorted by (priority, arrival)
  std::vector<Sequence*> waiting_;
  std::vector<Chunk> chunks_;
  std::vector<Sequence*> unschedulable_;
  std::vector<Sequence*> prompts_;  // that may have a chunk in this step, scratch
  std::vector<Sequence*> holders_;  // of pages that may be demoted, scratch
  int64_t budget_ = 0;              // tokens left in the step
  StepWork work_;                   // of chunks_
  double seconds_ = kNoLimit;       // that they may take
  double demotion_seconds_ = 0;     // the cache's, when the step began to be scheduled
  double stream_seconds_ = 0;       // that they may take in a step that some sequence waits for
  Blocked blocked_;                 // admission
  Blocked blocked_prepare_;
  int64_t arrivals_ = 0;
  int64_t preemptions_ = 0;
  int64_t prefix_queries_ = 0;
  int64_t prefix_hits_ = 0;
};

}  // namespace kvanta::scheduler
