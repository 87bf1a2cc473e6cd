#include "runner/runner.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "kvanta/error.h"

namespace kvanta::runner {
namespace {

template <class T>
Buffer Room(Device& device, int64_t count) {
  return device.Allocate(static_cast<size_t>(count) * sizeof(T));
}

// One array behind the other, by one copy.
template <class First, class Second>
void Upload(Device& device, Buffer& to, std::span<const First> first, std::span<const Second> second,
            std::vector<uint8_t>& staged) {
  staged.resize(first.size_bytes() + second.size_bytes());
  if (staged.empty()) return;
  if (!first.empty()) std::memcpy(staged.data(), first.data(), first.size_bytes());
  std::memcpy(staged.data() + first.size_bytes(), second.data(), second.size_bytes());
  device.CopyIn(to.data(), staged.data(), staged.size());
}

// Rows that launches are recorded for: 1, 2, 4, 8, 16, 24, ... Tiles of linear layers have 8 rows, so a step pays for
// little that it does not need.
int64_t BucketOf(int64_t rows, int64_t limit) {
  constexpr int64_t kStep = 8;
  int64_t bucket = (rows + kStep - 1) / kStep * kStep;
  for (const int64_t small : {4, 2, 1}) {
    if (rows <= small) bucket = small;
  }
  return std::min(bucket, limit);
}

}  // namespace

Runner::Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows, bool graphs)
    : model_(model), max_rows_(max_rows), max_logit_rows_(max_logit_rows), graphs_(graphs && Draws()) {
  Device& device = model.ops().device();
  const int64_t hidden = model.Config().hidden, vocab = model.Config().vocab;
  hidden_ = Room<float>(device, max_rows * hidden);
  gathered_ = Room<float>(device, max_logit_rows * hidden);
  logits_ = Room<float>(device, max_logit_rows * vocab);
  inputs_ = device.Allocate(static_cast<size_t>(max_rows) * (sizeof(int64_t) + sizeof(int32_t)));
  requested_ = device.Allocate(static_cast<size_t>(max_logit_rows) * (sizeof(kernels::SampleParams) + sizeof(int64_t)));
  results_ = device.Allocate(static_cast<size_t>(max_logit_rows) * (sizeof(kernels::RowArgmax) + sizeof(int32_t)));
  if (Draws()) {
    host_logits_ = device.AllocateHost(logits_.bytes());
    host_results_ = device.AllocateHost(results_.bytes());
  }
  tokens_.reserve(static_cast<size_t>(max_rows));
  positions_.reserve(static_cast<size_t>(max_rows));
  argmaxes_.reserve(static_cast<size_t>(max_logit_rows));
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
  const bool decodes = graphs_ && !items.empty() &&
                       std::ranges::all_of(items, [](const RunItem& item) { return item.tokens.size() == 1; });
  const int64_t bucket = decodes ? BucketOf(std::ssize(tokens_), max_rows_) : 0;
  if (planned_for_ != &backend) plan_.reset();  // a plan belongs to its backend
  planned_for_ = &backend;
  plan_ = backend.MakePlan({.sequences = spans_, .bucket = bucket}, std::move(plan_));
  if (decodes) {  // rows that nobody reads
    tokens_.resize(static_cast<size_t>(bucket), 0);
    positions_.resize(static_cast<size_t>(bucket), 0);
  }
  Upload<int64_t, int32_t>(model_.ops().device(), inputs_, positions_, tokens_, staged_);
  const std::span positions(inputs_.as<int64_t>(), positions_.size());
  const std::span ids(reinterpret_cast<const int32_t*>(inputs_.as<int64_t>() + positions_.size()), tokens_.size());
  const auto forward = [&] {
    model_.Forward({.tokens = ids, .positions = positions}, backend, *plan_, hidden_.as<float>());
  };
  if (!decodes) return forward();
  Begin(forwards_, bucket, plan_->Version(), forward);
}

// The first time they go one by one: that loads the kernels, which nothing that is recorded may.
void Runner::Begin(Graphs& graphs, int64_t rows, uint64_t version, const std::function<void()>& launches) {
  CapturedGraph& known = graphs[rows];
  if (known.graph && known.version == version) return known.graph->Run();
  launches();
  try {
    known.graph = model_.ops().Record(launches);
    known.version = version;
  } catch (const ResourceError&) {  // a graph takes memory; the launches are under way without it
    graphs_ = false;
    known.graph.reset();
  }
}

std::span<float> Runner::Logits(std::span<const int64_t> rows, std::span<const SampleRow> uses) {
  assert(static_cast<int64_t>(rows.size()) <= max_logit_rows_);
  assert(uses.empty() || uses.size() == rows.size());
  kernels::Ops& ops = model_.ops();
  const bool recorded = graphs_ && !uses.empty();
  const int64_t count = recorded ? BucketOf(std::ssize(rows), max_logit_rows_) : std::ssize(rows);
  rows_.assign(rows.begin(), rows.end());
  rows_.resize(static_cast<size_t>(count), 0);
  draws_.clear();
  for (const SampleRow& use : uses) draws_.push_back(use.draw);
  if (!uses.empty()) draws_.resize(static_cast<size_t>(count));
  Upload<kernels::SampleParams, int64_t>(ops.device(), requested_, draws_, rows_, staged_);
  const auto* draws = requested_.as<const kernels::SampleParams>();
  const auto* requested = reinterpret_cast<const int64_t*>(draws + draws_.size());
  auto* argmaxes = results_.as<kernels::RowArgmax>();
  auto* tokens = reinterpret_cast<int32_t*>(argmaxes + max_logit_rows_);
  const int64_t vocab = model_.Config().vocab;
  const auto launches = [&, this] {
    ops.Gather(hidden_.as<float>(), model_.Config().hidden, requested, count, gathered_.as<float>());
    model_.Logits(gathered_.as<float>(), count, logits_.as<float>(), argmaxes);
    if (!uses.empty()) ops.Draw(logits_.as<float>(), count, vocab, argmaxes, draws, tokens);
    if (Draws()) ops.device().CopyOutAsync(host_results_.data(), results_.data(), results_.bytes());
  };
  if (recorded) {
    Begin(sample_graphs_, count, 0, launches);
  } else {
    launches();
  }
  const size_t logits = rows.size() * static_cast<size_t>(vocab);
  if (Draws()) {
    Fetch(rows.size(), uses);
    return {host_logits_.as<float>(), logits};
  }
  argmaxes_.assign(argmaxes, argmaxes + count);
  return {logits_.as<float>(), logits};
}

// Brings the logits that the host reads: one wait, for them and the results.
void Runner::Fetch(size_t rows, std::span<const SampleRow> uses) {
  Device& device = model_.ops().device();
  const size_t row_bytes = static_cast<size_t>(model_.Config().vocab) * sizeof(float);
  const auto fetch_row = [&](size_t row) {
    device.CopyOutAsync(host_logits_.data() + row * row_bytes, logits_.data() + row * row_bytes, row_bytes);
  };
  if (uses.empty()) device.CopyOutAsync(host_logits_.data(), logits_.data(), rows * row_bytes);
  for (size_t row = 0; row < uses.size(); ++row) {
    if (uses[row].read) fetch_row(row);
  }
  device.Synchronize();
  const auto* argmaxes = host_results_.as<kernels::RowArgmax>();
  argmaxes_.assign(argmaxes, argmaxes + rows);
  sampled_tokens_.assign(rows, -1);
  if (uses.empty()) return;
  const auto* drawn = reinterpret_cast<const int32_t*>(argmaxes + max_logit_rows_);
  bool more = false;
  for (size_t row = 0; row < rows; ++row) {
    if (uses[row].read) continue;
    if (argmaxes_[row].finite && drawn[row] >= 0) {
      sampled_tokens_[row] = drawn[row];
    } else {  // someone has to say what is wrong, or to choose from more than there was room for
      fetch_row(row);
      more = true;
    }
  }
  if (more) device.Synchronize();
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
