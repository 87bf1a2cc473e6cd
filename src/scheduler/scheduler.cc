#include "scheduler/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::scheduler {
namespace {

void InsertInQueue(std::vector<Sequence*>& queue, Sequence* sequence) {
  const auto before = [](const Sequence* a, const Sequence* b) { return RunsBefore(*a, *b); };
  queue.insert(std::upper_bound(queue.begin(), queue.end(), sequence, before), sequence);
}

// True if a waiting sequence may be looked at: loading ones let others pass once their memory is reserved.
bool IsReady(const Sequence* sequence) {
  return (!sequence->loading || sequence->awaits_memory) && !sequence->sampling;
}

bool EraseFrom(std::vector<Sequence*>& queue, const Sequence* sequence) {
  const auto it = std::find(queue.begin(), queue.end(), sequence);
  if (it == queue.end()) return false;
  queue.erase(it);
  return true;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config, cache::KvCacheManager& cache)
    : config_(config),
      cache_(cache),
      reservations_(cache),
      demotions_(cache),
      times_(cache.spec),
      order_(config.prompts) {
  if (config.max_step_tokens < config.page_size) {
    throw InputError(fmt::format("max_num_batched_tokens = {}: must be at least the page size, {}",
                                 config.max_step_tokens, config.page_size));
  }
  if (config.max_sequences < 1) {
    throw InputError(fmt::format("max_num_seqs = {}: must be at least 1", config.max_sequences));
  }
}

void Scheduler::Wait(Sequence& sequence) {
  sequence.prefix_tokens = sequence.skip_prefix_match ? 0 : sequence.pages.CachedTokens(sequence.tokens);
  InsertInQueue(waiting_, &sequence);
}

void Scheduler::Add(Sequence& sequence) {
  sequence.arrival = arrivals_++;
  order_.Add(sequence);
  try {
    Wait(sequence);
  } catch (...) {
    order_.Remove(sequence);
    throw;
  }
}

void Scheduler::Remove(Sequence& sequence) {
  reservations_.End(sequence);
  if (!EraseFrom(running_, &sequence)) EraseFrom(waiting_, &sequence);
  sequence.running = false;
  order_.Remove(sequence);
  if (blocked_.sequence == &sequence) blocked_ = {};  // its address may become another sequence's
  blocked_prepare_ = {};                              // it may have been before that one
  sequence.pages.Finish(sequence.tokens);
}

// True if the step has a prefill chunk.
bool Scheduler::HasPromptChunk() const {
  return std::ranges::any_of(chunks_, [](const Chunk& chunk) { return chunk.tokens > 1 || !chunk.last; });
}

// Rows of logits of the next `tokens` tokens.
int64_t Scheduler::LogitRows(const Sequence& sequence, int64_t tokens) const noexcept {
  return sequence.logits_of_prompt ? tokens : tokens == sequence.Remaining() ? 1 : 0;
}

// Largest chunk within the budgets that ends on a page boundary or at the sequence's end; 0 if there is none.
// Exceptions: a step's first prompt takes the whole budget if alignment would waste more than half of it; otherwise
// decoding sequences that leave less than a page would starve prefill. With a clock, chunks below two pages are not
// aligned at all.
int64_t Scheduler::ChunkTokens(const Sequence& sequence) const {
  const int64_t remaining = sequence.Remaining();
  if (config_.whole_sequences) return remaining <= budget_ ? remaining : 0;
  int64_t budget = budget_;
  if (config_.long_prompt_tokens > 0 && remaining > 1) budget = std::min(budget, config_.long_prompt_tokens);
  if (seconds_ < kNoLimit && remaining > 1) budget = TokensInTime(sequence, std::min(remaining, budget));
  budget = sequence.pages.StepTokens(budget);
  if (remaining <= budget) return remaining;
  if (seconds_ < kNoLimit && budget < 2 * config_.page_size) return budget;
  const int64_t start = sequence.pages.Length();
  const int64_t aligned = (start + budget) / config_.page_size * config_.page_size - start;
  return 2 * aligned < budget && !HasPromptChunk() ? budget : std::max<int64_t>(0, aligned);
}

void Scheduler::Append(Sequence& sequence, int64_t tokens) {
  const double before = times_.Seconds(work_);
  times_.Add(work_, sequence.pages.Length(), tokens, LogitRows(sequence, tokens));
  chunks_.push_back({.sequence = &sequence,
                     .start = sequence.pages.Length(),
                     .tokens = static_cast<int>(tokens),
                     .last = tokens == sequence.Remaining(),
                     .seconds = times_.Seconds(work_) - before,
                     .is_prompt = sequence.Remaining() > 1});
  budget_ -= tokens;
}

void Scheduler::Preempt(Sequence& sequence) {
  const auto chunk =
      std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& c) { return c.sequence == &sequence; });
  if (chunk != chunks_.end()) {
    budget_ += chunk->tokens;
    chunks_.erase(chunk);
    work_ = {};
    for (const Chunk& each : chunks_)
      times_.Add(work_, each.start, each.tokens, LogitRows(*each.sequence, each.tokens));
  }
  if (cache_.spec.floors != 0 && sequence.answered) {
    sequence.pages.Suspend(sequence.tokens);
    sequence.skip_prefix_match = true;
  } else {
    sequence.pages.Finish(sequence.tokens);
  }
  EraseFrom(running_, &sequence);
  sequence.running = false;
  Wait(sequence);
  ++sequence.preemptions;
  ++preemptions_;
}

// The sequence that takes least time to bring back, of those after `sequence` that come last by priority, and the last
// one of equals; `sequence` itself if there is none. What others share with it stays in the cache.
Sequence& Scheduler::Cheapest(Sequence& sequence) const noexcept {
  const auto cost = [](const Sequence& each) { return std::max<int64_t>(0, each.pages.Length() - each.prefix_tokens); };
  Sequence* cheapest = running_.back();
  for (auto each = running_.rbegin(); each != running_.rend(); ++each) {
    if ((*each)->priority != running_.back()->priority || !RunsBefore(sequence, **each)) break;
    if (cost(**each) < cost(*cheapest)) cheapest = *each;
  }
  return *cheapest;
}

// Reserves `tokens`, after the demotions that the sequence replays. False if memory is short.
bool Scheduler::Reserve(Sequence& sequence, int64_t tokens) {
  return sequence.pages.ReplayEvents(sequence.tokens) && sequence.pages.Reserve(tokens);
}

// Demotes pages for the next `tokens` of a sequence. False if there is none to demote.
bool Scheduler::Demote(Sequence& sequence, int64_t tokens) {
  if (cache_.spec.floors == 0) return false;
  holders_ = running_;
  if (!sequence.running) InsertInQueue(holders_, &sequence);
  const cache::PagePool& pool = cache_.pool;
  const int64_t free = pool.BudgetBytes() - pool.ReserveBytes() - pool.UsedBytes();
  return demotions_.Free(holders_, sequence.pages.BytesToReserve(tokens) - free);
}

// True if the sequence fits alone. One that cannot be computed with the same bits again is computed with others.
bool Scheduler::Fits(Sequence& sequence) const {
  const auto length = static_cast<int64_t>(sequence.tokens.size());
  const auto fits = [&] { return sequence.pages.MaxBytes(length) <= cache_.pool.BudgetBytes(); };
  if (!fits() && sequence.preemptions > 0 && sequence.pages.Replays()) sequence.pages.EndReplay();
  return fits();
}

// Reserves `tokens`. If pages run out, demotes pages, then shrinks a prefill chunk page by page, then ends preparations
// and preempts sequences later in the queue, never earlier ones. Returns false if `sequence` itself was preempted.
bool Scheduler::ReserveOrPreempt(Sequence& sequence, int64_t& tokens) {
  const int64_t start = sequence.pages.Length();
  const int64_t one_page = std::min(tokens, config_.page_size - start % config_.page_size);
  for (;;) {
    const int64_t bytes = reservations_.Count() > 0 ? sequence.pages.BytesToReserve(tokens) : 0;
    if (bytes <= reservations_.AvailableBytes(&sequence)) {
      if (Reserve(sequence, tokens)) return true;
      if (Demote(sequence, tokens)) continue;
    }
    if (tokens > one_page) {
      const int64_t pages = (start + tokens - 1) / config_.page_size - start / config_.page_size;
      tokens = std::max(one_page, (start / config_.page_size + (pages + 1) / 2) * config_.page_size - start);
      continue;
    }
    if (reservations_.EndLastBehind(running_.back())) continue;
    Sequence& victim = Cheapest(sequence);
    Preempt(victim);
    if (&victim == &sequence) return false;
  }
}

void Scheduler::ScheduleRunning(Sequence& sequence) {
  int64_t tokens = ChunkTokens(sequence);
  if (tokens > 0 && ReserveOrPreempt(sequence, tokens)) Append(sequence, tokens);
}

void Scheduler::ScheduleDecodes() {
  const int64_t limit = CeilDiv(Running(), config_.steps_in_flight);
  // Preemption removes only the current and later sequences, so the index stays valid.
  for (size_t i = 0; i < running_.size() && std::ssize(chunks_) < limit;) {
    Sequence& sequence = *running_[i];
    if (sequence.Remaining() == 1 && sequence.pages.Reserved() == 0) ScheduleRunning(sequence);
    if (i < running_.size() && running_[i] == &sequence) ++i;
  }
}

// A sequence whose prompt needs further steps, or this one.
bool Scheduler::IsPartial(const Sequence& sequence) const noexcept {
  return sequence.running && sequence.Remaining() > 1;
}

bool Scheduler::IsLong(const Sequence& sequence) const noexcept {
  return config_.long_prompt_tokens > 0 && std::ssize(sequence.tokens) > config_.long_prompt_tokens;
}

// True if the limits of prompts that are computed at the same time allow one more.
bool Scheduler::MayStart(const Sequence& sequence) const noexcept {
  const auto partial = std::ranges::count_if(running_, [&](const Sequence* each) { return IsPartial(*each); });
  if (config_.max_partial_prompts > 0 && partial >= config_.max_partial_prompts) return false;
  if (config_.max_long_partial_prompts == 0 || !IsLong(sequence)) return true;
  const auto are_long =
      std::ranges::count_if(running_, [&](const Sequence* each) { return IsPartial(*each) && IsLong(*each); });
  return are_long < config_.max_long_partial_prompts;
}

// preemptions: those before the step.
void Scheduler::SchedulePrompts(const std::optional<StepClock>& clock, int64_t preemptions) {
  // No admission in a step that preempted, and after one that failed none but of sequences whose memory is reserved.
  bool admits = true;
  const auto has_place = [&] { return preemptions == preemptions_ && Running() < config_.max_sequences; };
  const auto may_start = [&](const Sequence& sequence) {
    return has_place() && (admits || (sequence.reservation && !sequence.loading));
  };
  prompts_.clear();
  std::ranges::copy_if(running_, std::back_inserter(prompts_),
                       [](const Sequence* each) { return each->Remaining() > 1 && each->pages.Reserved() == 0; });
  if (has_place()) std::ranges::copy_if(waiting_, std::back_inserter(prompts_), IsReady);
  const bool by_order = clock || config_.prompts.fair;
  if (by_order && !prompts_.empty()) {
    order_.Begin(prompts_, clock ? std::optional(clock->now) : std::nullopt, PromptTokenSeconds());
  }
  const auto before = [&](const Sequence* a, const Sequence* b) { return order_.Before(*a, *b); };
  for (auto next = prompts_.begin(); budget_ > 0 && next != prompts_.end();) {
    if (by_order) std::iter_swap(next, std::min_element(next, prompts_.end(), before));
    Sequence& sequence = **next++;
    const auto chunks = std::ssize(chunks_);
    if (sequence.running) {
      ScheduleRunning(sequence);
      if (clock && HasPromptChunk() && std::ssize(chunks_) == chunks) return;  // no time for a single row
    } else if (may_start(sequence)) {
      admits = TryAdmit(sequence) && admits;
    }
    if (!admits || !has_place()) {  // thousands may wait
      const auto waits = [&](const Sequence* each) { return !each->running && !may_start(*each); };
      prompts_.erase(std::remove_if(next, prompts_.end(), waits), prompts_.end());
    }
    if (!clock || chunks_.empty()) continue;
    if (chunks_.back().last) seconds_ = std::min(seconds_, stream_seconds_);  // its first token waits for the step
    if (times_.Seconds(work_) >= SecondsLeft()) return;
  }
}

Scheduler::Blocked Scheduler::StateOf(const Sequence& sequence) const noexcept {
  return {&sequence, Running(), cache_.prefix ? cache_.prefix->Pages() : 0, reservations_.AvailableBytes()};
}

// Attaches the cached prefix and admits the sequence if its other tokens fit in the available memory.
bool Scheduler::Admit(Sequence& sequence) {
  const int64_t matched = sequence.skip_prefix_match ? 0 : sequence.pages.MatchPrefix(sequence.tokens);
  int64_t tokens = ChunkTokens(sequence);
  if (tokens == 0) {
    sequence.pages.Clear();
    return false;
  }
  const auto block = [&] {
    sequence.pages.Clear();
    blocked_ = StateOf(sequence);
    return false;
  };
  // Requires memory for all its tokens and one more page per running sequence (whose exact pages are freed as new ones
  // are allocated); with less, a preemption would soon follow. One that is prepared has its memory.
  if (!sequence.reservation && (!running_.empty() || reservations_.Count() > 0)) {
    const auto length = static_cast<int64_t>(sequence.tokens.size());
    const int64_t need =
        sequence.pages.MaxBytes(length) - cache_.spec.MaxBytes(matched, 0) + Running() * cache_.spec.PageBytes();
    if (!reservations_.MakeRoom(sequence, need)) return block();
  }
  const int64_t one_page = config_.whole_sequences ? tokens : std::min<int64_t>(tokens, config_.page_size);
  while (!Reserve(sequence, tokens)) {
    if (Demote(sequence, tokens)) continue;
    if (tokens == one_page) {
      if (reservations_.EndLastBehind(&sequence)) continue;
      return block();
    }
    tokens = std::max<int64_t>(one_page, tokens / 2 / config_.page_size * config_.page_size);
  }
  if (sequence.cached_tokens < 0) {
    sequence.cached_tokens = matched;
    if (cache_.prefix && !sequence.skip_prefix_match) prefix_queries_ += static_cast<int64_t>(sequence.tokens.size());
    prefix_hits_ += matched;
  }
  reservations_.End(sequence);  // its pages have references of their own
  sequence.prefix_tokens = matched;
  InsertInQueue(running_, &sequence);
  sequence.running = true;
  Append(sequence, tokens);
  return true;
}

bool Scheduler::Prepare(Sequence& sequence) {
  const Blocked state = StateOf(sequence);
  if (state.NoBetterThan(blocked_prepare_)) return false;
  int64_t other_bytes = Running() * cache_.spec.PageBytes();
  for (const Sequence* each : waiting_) {
    if (each == &sequence) break;
    if (each->sampling || each->reservation) continue;
    other_bytes += cache_.spec.MaxBytes(static_cast<int64_t>(each->tokens.size()));
  }
  const bool done = reservations_.Add(sequence, other_bytes);
  blocked_prepare_ = done ? Blocked{} : state;
  return done;
}

// False if no other sequence may be admitted in this step, but for those whose memory is reserved.
bool Scheduler::TryAdmit(Sequence& sequence) {
  if (sequence.awaits_memory) return false;
  if (!MayStart(sequence)) return IsLong(sequence);  // shorter ones may, unless the limit is that of all
  if (!Fits(sequence)) {
    Refuse(sequence);
    return true;
  }
  if (StateOf(sequence).NoBetterThan(blocked_)) return false;
  EraseFrom(waiting_, &sequence);
  if (Admit(sequence)) return true;
  InsertInQueue(waiting_, &sequence);
  return false;
}

void Scheduler::Refuse(Sequence& sequence) {
  EraseFrom(waiting_, &sequence);
  reservations_.End(sequence);
  unschedulable_.push_back(&sequence);
}

std::span<const Chunk> Scheduler::Schedule(const std::optional<StepClock>& clock) {
  chunks_.clear();
  unschedulable_.clear();
  budget_ = config_.max_step_tokens;
  work_ = {};
  seconds_ = kNoLimit;
  demotion_seconds_ = cache_.demotion_seconds;
  const int64_t preemptions = preemptions_;
  ScheduleDecodes();
  if (clock) LimitTime(*clock);
  SchedulePrompts(clock, preemptions);
  reservations_.Trim();
  if (!chunks_.empty() || !running_.empty()) return chunks_;
  // The first sequence has the cache to itself and does not fit. If preemption just emptied the running queue, it is
  // tried again with all pages freed.
  const auto first = std::ranges::find_if(waiting_, IsReady);
  if (first == waiting_.end() || (*first)->awaits_memory) return chunks_;
  Sequence& sequence = **first;
  budget_ = config_.max_step_tokens;
  const bool fits = Fits(sequence);
  waiting_.erase(first);
  if (fits && Admit(sequence)) return chunks_;
  InsertInQueue(waiting_, &sequence);
  if (!fits || !reservations_.HasBefore(sequence))
    Refuse(sequence);  // else what has the memory will run, or give it up
  return chunks_;
}

int64_t Scheduler::DraftSlots(const Chunk& chunk) const noexcept {
  const int64_t slots = config_.page_size - (chunk.start + chunk.tokens) % config_.page_size;
  if (slots == config_.page_size) return 0;
  return std::min(slots - 1, chunk.sequence->pages.StepTokens(chunk.tokens + slots) - chunk.tokens);
}

void Scheduler::Commit() {
  for (const Chunk& chunk : chunks_) {
    chunk.sequence->pages.Commit(chunk.sequence->tokens);
    order_.Charge(*chunk.sequence, chunk.tokens, chunk.seconds, chunk.is_prompt);  // not the chunks of preempted ones
  }
  chunks_.clear();
}

}  // namespace kvanta::scheduler
