// Samples many rows at once on the thread pool. The result does not depend on the threads.
#pragma once

#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "runner/sample_row.h"
#include "runner/sampler.h"

namespace kvanta::runner {

class RowSampler {
 public:
  explicit RowSampler(ThreadPool& threads);
  // Sets each row's token and log-probabilities. Rows after the first draft token that differs from the sampled one
  // are left unchanged. Throws std::bad_alloc; the rows are undefined then.
  void Run(std::span<SampleRow> rows);

 private:
  struct Worker {
    Sampler sampler;
    std::vector<float> raw;  // copy of the logits, where the log-probabilities of a sampled token are asked for
  };
  static void RunOne(SampleRow& row, Worker& worker);
  static void RunUntilRejection(std::span<SampleRow> rows, Worker& worker);

  ThreadPool& threads_;
  std::vector<Worker> workers_;
  std::vector<size_t> first_rows_;  // first of each sequence's rows to sample, or a row without a draft
};

}  // namespace kvanta::runner
