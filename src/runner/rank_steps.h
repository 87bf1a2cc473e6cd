// Steps of rank 0's runner, which the other ranks repeat with their parts of the model and of the cache. In a pipeline,
// each rank has consecutive layers: hidden states go from rank to rank, and from the last one back to rank 0.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "base/cpu_scope.h"
#include "base/thread_pool.h"
#include "cache/page_pool.h"
#include "parallel/communicator.h"

namespace kvanta::runner {

struct RunItem;
class Runner;

// Division of a model among ranks.
enum class Division : uint8_t {
  kTensorParallel,    // each layer among all ranks
  kPipelineParallel,  // consecutive layers to each rank
};

// Sends steps from rank 0. The records of `pool` have the same numbers in all ranks (cache::PagePoolConfig). Send
// methods throw RankLostError once a rank is lost.
class StepSender {
 public:
  StepSender(parallel::Communicator& ranks, cache::PagePool& pool, Division division)
      : ranks_(ranks), pool_(pool), division_(division) {}
  ~StepSender();  // ends the others' FollowSteps
  StepSender(const StepSender&) = delete;
  StepSender& operator=(const StepSender&) = delete;

  bool IsPipeline() const noexcept { return division_ == Division::kPipelineParallel; }
  // Steps that occupy all ranks.
  int Depth() const noexcept { return IsPipeline() ? ranks_.Size() : 1; }
  void SendForward(std::span<const RunItem> items);
  // Output rows [first, first + count). for_samples: to be sampled on the device.
  void SendLogits(int64_t first, int64_t count, bool for_samples);
  // CPUs of the thread that made this object. Steps stay on them: on another rank's CPU, a thread would have to wait
  // for one that polls for its results.
  const CpuSet& Cpus() const noexcept { return cpus_; }
  parallel::Communicator& Ranks() const noexcept { return ranks_; }
  // Throws RankLostError if a rank was lost in a step.
  void Check() const { ranks_.Check(); }

 private:
  parallel::Communicator& ranks_;
  cache::PagePool& pool_;
  const Division division_;
  const CpuSet cpus_;
  std::vector<uint8_t> message_;
};

// Repeats rank 0's steps until its StepSender ends, and the changes of the cache's records. threads: round states.
// Throws what the steps throw, and RankLostError once a rank is lost.
void FollowSteps(parallel::Communicator& ranks, cache::PagePool& pool, Runner& runner, attention::Backend& backend,
                 ThreadPool& threads);

}  // namespace kvanta::runner
