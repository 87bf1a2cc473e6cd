#include "runner/row_sampler.h"

#include <atomic>
#include <new>

namespace kvanta::runner {

RowSampler::RowSampler(ThreadPool& threads) : threads_(threads), workers_(static_cast<size_t>(threads.Threads())) {}

void RowSampler::RunOne(RowTask& task, Worker& worker) {
  if (task.chosen) return;
  if (task.state == nullptr) {
    task.result = ComputeLogprobs(task.logits, task.token, task.logprobs);
    return;
  }
  if (task.logprobs >= 0) worker.raw.assign(task.logits.begin(), task.logits.end());
  task.token = worker.sampler.Sample(task.logits, *task.state, task.mask, task.max_value);
  if (task.logprobs >= 0 && task.token >= 0) {
    task.result = ComputeLogprobs(worker.raw, task.token, task.logprobs);
  }
}

void RowSampler::Run(std::span<RowTask> tasks) {
  std::atomic<bool> failed = false;  // a region must not throw
  auto run = [&](int64_t task, int worker) {
    try {
      RunOne(tasks[static_cast<size_t>(task)], workers_[static_cast<size_t>(worker)]);
    } catch (...) {
      failed = true;
    }
  };
  threads_.ForEach(static_cast<int64_t>(tasks.size()), run);
  if (failed) throw std::bad_alloc();
}

}  // namespace kvanta::runner
