#include "runner/row_sampler.h"

#include <atomic>
#include <new>

#include "runner/logprobs.h"

namespace kvanta::runner {

RowSampler::RowSampler(ThreadPool& threads) : threads_(threads), workers_(static_cast<size_t>(threads.Threads())) {}

void RowSampler::RunOne(SampleRow& row, Worker& worker) {
  if (row.sampled_on_device) return;
  if (row.state == nullptr) {
    row.result = ComputeLogprobs(row.logits, row.token, row.logprobs);
    return;
  }
  if (row.logprobs >= 0) worker.raw.assign(row.logits.begin(), row.logits.end());
  row.token = worker.sampler.Sample(row.logits, *row.state, row.mask, row.argmax, row.drafts);
  if (row.logprobs >= 0 && row.token >= 0) {
    row.result = ComputeLogprobs(worker.raw, row.token, row.logprobs, row.logprob_token_ids);
  }
}

void RowSampler::Run(std::span<SampleRow> rows) {
  std::atomic<bool> failed = false;  // ForEach takes no exceptions
  auto run = [&](int64_t row, int worker) {
    try {
      RunOne(rows[static_cast<size_t>(row)], workers_[static_cast<size_t>(worker)]);
    } catch (...) {
      failed = true;
    }
  };
  threads_.ForEach(static_cast<int64_t>(rows.size()), run);
  if (failed) throw std::bad_alloc();
}

}  // namespace kvanta::runner
