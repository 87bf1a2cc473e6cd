// A step's batch, and the steps that are in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/request_state.h"
#include "runner/row_sampler.h"
#include "runner/runner.h"
#include "scheduler/scheduler.h"

namespace kvanta::engine {

// The batch and its rows of logits, in the batch's order. Requests with pooling come last, so that the output rows of
// the forward pass begin with those of logits.
struct StepBatch {
  std::vector<scheduler::Chunk> chunks;
  std::vector<std::shared_ptr<RequestState>> requests;  // the chunks' requests; may end while the step is in flight
  std::vector<runner::RunItem> items;
  std::vector<runner::SampleRow> rows;
  std::vector<int> accepted_drafts;  // [chunks] that stay in the cache
  float min_acceptance = 0;          // minimum acceptance of its drafts
  int64_t prompt_tokens = 0;         // prompt tokens, without those that are computed again after a preemption
  runner::Runner::Ticket ticket = 0;
  double seconds = 0;  // its forward pass and logits took on this rank
  scheduler::StepWork work;
  double begin = 0, expected_seconds = 0;  // begin and expected duration of the whole step
};

// Ring buffer of the steps in flight: one, or one of each stage of a pipeline.
class StepsInFlight {
 public:
  explicit StepsInFlight(size_t capacity = 1) : batches_(capacity) {}
  size_t Count() const noexcept { return count_; }
  bool IsFull() const noexcept { return count_ == batches_.size(); }
  // The batch to fill before Push(), while there is space.
  StepBatch& Next() noexcept { return batches_[(oldest_ + count_) % batches_.size()]; }
  void Push() noexcept { ++count_; }
  // Valid until the next call of Next().
  StepBatch& PopOldest() noexcept {
    StepBatch& batch = batches_[oldest_];
    oldest_ = (oldest_ + 1) % batches_.size();
    --count_;
    return batch;
  }

 private:
  std::vector<StepBatch> batches_;
  size_t oldest_ = 0, count_ = 0;
};

}  // namespace kvanta::engine
