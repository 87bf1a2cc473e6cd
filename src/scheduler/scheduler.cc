#include "scheduler/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::scheduler {
namespace {

void InsertInQueue(std::vector<Sequence*>& queue, Sequence* sequence) {
  const auto before = [](const Sequence* a, const Sequence* b) { return RunsBefore(*a, *b); };
  queue.insert(std::upper_bound(queue.begin(), queue.end(), sequence, before), sequence);
}

bool EraseFrom(std::vector<Sequence*>& queue, const Sequence* sequence) {
  const auto it = std::find(queue.begin(), queue.end(), sequence);
  if (it == queue.end()) return false;
  queue.erase(it);
  return true;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config, cache::KvCacheManager& cache)
    : config_(config), cache_(cache), reservations_(cache) {
  if (config.max_step_tokens < config.page_size) {
    throw InputError(fmt::format("max_num_batched_tokens = {}: must be at least the page size, {}",
                                 config.max_step_tokens, config.page_size));
  }
  if (config.max_sequences < 1) {
    throw InputError(fmt::format("max_num_seqs = {}: must be at least 1", config.max_sequences));
  }
}

void Scheduler::Add(Sequence& sequence) {
  sequence.arrival = arrivals_++;
  InsertInQueue(waiting_, &sequence);
}

void Scheduler::Remove(Sequence& sequence) {
  reservations_.End(sequence);
  if (!EraseFrom(running_, &sequence)) EraseFrom(waiting_, &sequence);
  if (blocked_.sequence == &sequence) blocked_ = {};  // its address may become another sequence's
  blocked_prepare_ = {};                              // it may have been before that one
  sequence.pages.Finish(sequence.tokens);
}

// True if the step has a prefill chunk.
bool Scheduler::HasPromptChunk() const {
  return std::ranges::any_of(chunks_, [](const Chunk& chunk) { return chunk.tokens > 1 || !chunk.last; });
}

// Largest chunk within `budget` that ends on a page boundary or at the sequence's end; 0 if there is none. Exception: a
// step's first prompt takes the whole budget if alignment would waste more than half of it; otherwise decoding
// sequences that leave less than a page would starve prefill.
int64_t Scheduler::ChunkTokens(const Sequence& sequence, int64_t budget) const {
  const int64_t remaining = sequence.Remaining();
  if (remaining <= budget) return remaining;
  const int64_t start = sequence.pages.Length();
  const int64_t aligned = (start + budget) / config_.page_size * config_.page_size - start;
  return 2 * aligned < budget && !HasPromptChunk() ? budget : std::max<int64_t>(0, aligned);
}

void Scheduler::Append(Sequence& sequence, int64_t tokens) {
  chunks_.push_back({&sequence, sequence.pages.Length(), static_cast<int>(tokens), tokens == sequence.Remaining()});
  budget_ -= tokens;
}

void Scheduler::Preempt(Sequence& sequence) {
  const auto chunk =
      std::find_if(chunks_.begin(), chunks_.end(), [&](const Chunk& c) { return c.sequence == &sequence; });
  if (chunk != chunks_.end()) {
    budget_ += chunk->tokens;
    chunks_.erase(chunk);
  }
  sequence.pages.Finish(sequence.tokens);
  EraseFrom(running_, &sequence);
  InsertInQueue(waiting_, &sequence);
  ++sequence.preemptions;
  ++preemptions_;
}

// Reserves `tokens`. If pages run out, first shrinks a prefill chunk page by page, then ends preparations and preempts
// sequences later in the queue, never earlier ones. Returns false if `sequence` itself was preempted.
bool Scheduler::ReserveOrPreempt(Sequence& sequence, int64_t& tokens) {
  const int64_t start = sequence.pages.Length();
  const int64_t one_page = std::min(tokens, config_.page_size - start % config_.page_size);
  for (;;) {
    const int64_t bytes = reservations_.Count() > 0 ? sequence.pages.BytesToReserve(tokens) : 0;
    if (bytes <= reservations_.AvailableBytes(&sequence) && sequence.pages.Reserve(tokens)) return true;
    if (tokens > one_page) {
      const int64_t pages = (start + tokens - 1) / config_.page_size - start / config_.page_size;
      tokens = std::max(one_page, (start / config_.page_size + (pages + 1) / 2) * config_.page_size - start);
      continue;
    }
    Sequence* last = running_.back();
    if (reservations_.EndLastBehind(last)) continue;
    Preempt(*last);
    if (last == &sequence) return false;
  }
}

void Scheduler::ScheduleRunning(bool decodes) {
  const int64_t limit = decodes ? CeilDiv(Running(), config_.steps_in_flight) : Running();
  // Preemption removes only the current and later sequences, so the index stays valid.
  for (size_t i = 0; i < running_.size() && std::ssize(chunks_) < limit;) {
    Sequence& sequence = *running_[i];
    const bool decode = sequence.Remaining() == 1;
    int64_t tokens = decode == decodes && sequence.pages.Reserved() == 0 ? ChunkTokens(sequence, budget_) : 0;
    if (tokens == 0) {
      ++i;
      continue;
    }
    if (ReserveOrPreempt(sequence, tokens)) {
      Append(sequence, tokens);
      ++i;
    }
  }
}

Scheduler::Blocked Scheduler::StateOf(const Sequence& sequence) const noexcept {
  return {&sequence, Running(), cache_.prefix ? cache_.prefix->Pages() : 0, reservations_.AvailableBytes()};
}

// Attaches the cached prefix and admits the sequence if its other tokens fit in the available memory.
bool Scheduler::Admit(Sequence& sequence) {
  const int64_t matched = sequence.skip_prefix_match ? 0 : sequence.pages.MatchPrefix(sequence.tokens);
  int64_t tokens = ChunkTokens(sequence, budget_);
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
        cache_.spec.MaxBytes(length) - cache_.spec.MaxBytes(matched, 0) + Running() * cache_.spec.PageBytes();
    if (!reservations_.MakeRoom(sequence, need)) return block();
  }
  const int64_t one_page = std::min<int64_t>(tokens, config_.page_size);
  while (!sequence.pages.Reserve(tokens)) {
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
  InsertInQueue(running_, &sequence);
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

Sequence* Scheduler::TakeWaiting() {
  const auto first = std::ranges::find_if(
      waiting_, [](const Sequence* each) { return (!each->loading || each->awaits_memory) && !each->sampling; });
  if (first == waiting_.end() || (*first)->awaits_memory) return nullptr;
  Sequence* sequence = *first;
  waiting_.erase(first);
  return sequence;
}

void Scheduler::Refuse(Sequence& sequence) {
  reservations_.End(sequence);
  unschedulable_.push_back(&sequence);
}

std::span<const Chunk> Scheduler::Schedule() {
  chunks_.clear();
  unschedulable_.clear();
  budget_ = config_.max_step_tokens;
  const int64_t preemptions = preemptions_;
  ScheduleRunning(true);
  ScheduleRunning(false);
  // No admission in a step that preempted, and strictly in queue order, except that loading sequences let others pass
  // once their memory is reserved, or until they are scheduled.
  while (preemptions == preemptions_ && budget_ > 0 && Running() < config_.max_sequences) {
    Sequence* first = TakeWaiting();
    if (first == nullptr) break;
    if (cache_.spec.MaxBytes(static_cast<int64_t>(first->tokens.size())) > cache_.pool.BudgetBytes()) {
      Refuse(*first);
      continue;
    }
    if (!StateOf(*first).NoBetterThan(blocked_) && Admit(*first)) continue;
    InsertInQueue(waiting_, first);
    break;
  }
  reservations_.Trim();
  if (!chunks_.empty() || !running_.empty()) return chunks_;
  // The first sequence has the cache to itself and does not fit. If preemption just emptied the running queue, it is
  // tried again with all pages freed.
  if (Sequence* first = TakeWaiting(); first != nullptr) {
    budget_ = config_.max_step_tokens;
    const bool fits = cache_.spec.MaxBytes(static_cast<int64_t>(first->tokens.size())) <= cache_.pool.BudgetBytes();
    if (fits && Admit(*first)) return chunks_;
    if (fits && reservations_.HasBefore(*first)) {
      InsertInQueue(waiting_, first);  // what has the memory will run, or give it up
    } else {
      Refuse(*first);
    }
  }
  return chunks_;
}

int64_t Scheduler::DraftSlots(const Chunk& chunk) const noexcept {
  const int64_t slots = config_.page_size - (chunk.start + chunk.tokens) % config_.page_size;
  return slots == config_.page_size ? 0 : slots - 1;
}

void Scheduler::Commit() {
  for (const Chunk& chunk : chunks_) chunk.sequence->pages.Commit(chunk.sequence->tokens);
  chunks_.clear();
}

}  // namespace kvanta::scheduler
