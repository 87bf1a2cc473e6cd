#include "runner/row_sampler.h"

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

// rows: those of one sequence, each with one draft token more. They are sampled in order: sampling from a large
// vocabulary may take as long as the row's share of the forward pass, and most rejected drafts fail at the first token.
void RowSampler::RunUntilRejection(std::span<SampleRow> rows, Worker& worker) {
  for (size_t row = 0; row < rows.size(); ++row) {
    if (row > 0 && rows[row - 1].token != rows[row].drafts.back()) return;
    RunOne(rows[row], worker);
  }
}

void RowSampler::Run(std::span<SampleRow> rows) {
  first_rows_.clear();
  for (size_t row = 0; row < rows.size(); ++row) {
    // The rows of a draft may have begun in an earlier call.
    if (row == 0 || rows[row].drafts.empty() || rows[row].item != rows[row - 1].item) first_rows_.push_back(row);
  }
  auto run = [&](int64_t task, int worker) {
    const auto index = static_cast<size_t>(task);
    const size_t first = first_rows_[index];
    const size_t end = index + 1 < first_rows_.size() ? first_rows_[index + 1] : rows.size();
    RunUntilRejection(rows.subspan(first, end - first), workers_[static_cast<size_t>(worker)]);
  };
  threads_.ForEach(static_cast<int64_t>(first_rows_.size()), run);
}

}  // namespace kvanta::runner
