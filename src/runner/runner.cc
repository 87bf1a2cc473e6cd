#include "runner/runner.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace kvanta::runner {
namespace {

template <class T>
Buffer Room(Device& device, int64_t count) {
  return device.Allocate(static_cast<size_t>(count) * sizeof(T));
}

template <class T>
const T* Upload(Device& device, Buffer& to, std::span<const T> values) {
  device.CopyIn(to.data(), values.data(), values.size_bytes());
  return to.as<T>();
}

}  // namespace

Runner::Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows)
    : model_(model), max_rows_(max_rows), max_logit_rows_(max_logit_rows) {
  Device& device = model.ops().device();
  const int64_t hidden = model.Config().hidden, vocab = model.Config().vocab;
  hidden_ = Room<float>(device, max_rows * hidden);
  gathered_ = Room<float>(device, max_logit_rows * hidden);
  logits_ = Room<float>(device, max_logit_rows * vocab);
  ids_ = Room<int32_t>(device, max_rows);
  positions_memory_ = Room<int64_t>(device, max_rows);
  rows_memory_ = Room<int64_t>(device, max_logit_rows);
  results_ = device.Allocate(static_cast<size_t>(max_logit_rows) * (sizeof(kernels::RowPeak) + sizeof(int32_t)));
  if (Draws()) {
    draws_memory_ = Room<kernels::RowDraw>(device, max_logit_rows);
    host_logits_ = device.AllocateHost(logits_.bytes());
    host_results_ = device.AllocateHost(results_.bytes());
  }
  tokens_.reserve(static_cast<size_t>(max_rows));
  positions_.reserve(static_cast<size_t>(max_rows));
  peaks_.reserve(static_cast<size_t>(max_logit_rows));
}

void Runner::Forward(std::span<const RunItem> items, attention::Backend& backend) {
  tokens_.clear();
  positions_.clear();
  spans_.clear();
  for (const RunItem& item : items) {
    tokens_.insert(tokens_.end(), item.tokens.begin(), item.tokens.end());
    for (size_t i = 0; i < item.tokens.size(); ++i) positions_.push_back(item.start + static_cast<int64_t>(i));
    spans_.push_back({.start = item.start, .tokens = static_cast<int>(item.tokens.size()), .pages = item.pages});
  }
  assert(static_cast<int64_t>(tokens_.size()) <= max_rows_);
  if (planned_for_ != &backend) plan_.reset();  // a plan belongs to its backend
  planned_for_ = &backend;
  plan_ = backend.MakePlan({.sequences = spans_}, std::move(plan_));
  Device& device = model_.ops().device();
  const std::span ids(Upload<int32_t>(device, ids_, tokens_), tokens_.size());
  const std::span positions(Upload<int64_t>(device, positions_memory_, positions_), positions_.size());
  model_.Forward({.tokens = ids, .positions = positions}, backend, *plan_, hidden_.as<float>());
}

std::span<float> Runner::Logits(std::span<const int64_t> rows, std::span<const RowUse> uses) {
  assert(static_cast<int64_t>(rows.size()) <= max_logit_rows_);
  assert(uses.empty() || uses.size() == rows.size());
  kernels::Ops& ops = model_.ops();
  const auto count = static_cast<int64_t>(rows.size());
  const int64_t* wanted = Upload(ops.device(), rows_memory_, rows);
  ops.Gather(hidden_.as<float>(), model_.Config().hidden, wanted, count, gathered_.as<float>());
  auto* peaks = results_.as<kernels::RowPeak>();
  model_.Logits(gathered_.as<float>(), count, logits_.as<float>(), peaks);
  const size_t logits = rows.size() * static_cast<size_t>(model_.Config().vocab);
  if (Draws()) {
    Fetch(rows.size(), uses);
    return {host_logits_.as<float>(), logits};
  }
  peaks_.assign(peaks, peaks + count);
  return {logits_.as<float>(), logits};
}

// Draws where draws are wanted, and brings what the host reads: one wait.
void Runner::Fetch(size_t rows, std::span<const RowUse> uses) {
  kernels::Ops& ops = model_.ops();
  Device& device = ops.device();
  const auto vocab = static_cast<size_t>(model_.Config().vocab);
  const size_t row_bytes = vocab * sizeof(float);
  const auto fetch_row = [&](size_t row) {
    device.CopyOutLater(host_logits_.data() + row * row_bytes, logits_.data() + row * row_bytes, row_bytes);
  };
  auto* tokens = reinterpret_cast<int32_t*>(results_.as<kernels::RowPeak>() + max_logit_rows_);
  if (uses.empty()) {
    device.CopyOutLater(host_logits_.data(), logits_.data(), rows * row_bytes);
  } else {
    draws_.clear();
    for (const RowUse& use : uses) draws_.push_back(use.draw);
    const auto* draws = Upload<kernels::RowDraw>(device, draws_memory_, draws_);
    ops.Draw(logits_.as<float>(), static_cast<int64_t>(rows), static_cast<int64_t>(vocab),
             results_.as<kernels::RowPeak>(), draws, tokens);
    for (size_t row = 0; row < rows; ++row) {
      if (uses[row].read) fetch_row(row);
    }
  }
  device.CopyOutLater(host_results_.data(), results_.data(), results_.bytes());
  device.Wait();
  const auto* peaks = host_results_.as<kernels::RowPeak>();
  peaks_.assign(peaks, peaks + rows);
  drawn_.assign(rows, -1);
  if (uses.empty()) return;
  const auto* drawn = reinterpret_cast<const int32_t*>(peaks + max_logit_rows_);
  bool more = false;
  for (size_t row = 0; row < rows; ++row) {
    if (uses[row].read) continue;
    if (peaks_[row].finite) {
      drawn_[row] = drawn[row];
    } else {  // someone has to say what is wrong
      fetch_row(row);
      more = true;
    }
  }
  if (more) device.Wait();
}

void Runner::Logits(int64_t first, int64_t rows, float* out) {
  const float* hidden = hidden_.as<float>() + first * model_.Config().hidden;
  if (!Draws()) {
    model_.Logits(hidden, rows, out, nullptr);
    return;
  }
  assert(rows <= max_logit_rows_);
  model_.Logits(hidden, rows, logits_.as<float>(), nullptr);
  model_.ops().device().CopyOut(out, logits_.data(), static_cast<size_t>(rows * model_.Config().vocab) * sizeof(float));
}

}  // namespace kvanta::runner
