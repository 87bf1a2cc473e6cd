// Samples many rows at once, one task per row on the thread pool. The result does not depend on the threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "runner/logprobs.h"
#include "runner/sampler.h"

namespace kvanta::runner {

struct RowTask {
  std::span<float> logits;              // f32 [vocab]; changed in place by sampling
  const SamplerState* state = nullptr;  // nullptr: only the log-probabilities of `token`
  kernels::RowArgmax max_value;         // of the logits, if it was found
  std::span<const uint32_t> mask;       // as Sampler::Sample takes it
  int32_t token = 0;                    // in, without a state; out, with one (negative: Sampler says why there is none)
  bool chosen = false;                  // the token is there already, and nothing else is wanted
  int logprobs = -1;                    // -1: none
  std::vector<Logprob> result;          // of the raw logits; empty when those are invalid
};

class RowSampler {
 public:
  explicit RowSampler(ThreadPool& threads);
  // Throws std::bad_alloc when memory runs out; the tasks are undefined then.
  void Run(std::span<RowTask> tasks);

 private:
  struct Worker {
    Sampler sampler;
    std::vector<float> raw;  // a copy, when both the raw and the processed logits are wanted
  };
  void RunOne(RowTask& task, Worker& worker);

  ThreadPool& threads_;
  std::vector<Worker> workers_;
};

}  // namespace kvanta::runner
