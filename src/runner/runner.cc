#include "runner/runner.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::runner {
namespace {

template <class T>
Buffer AllocateArray(Device& device, int64_t count) {
  return device.Allocate(static_cast<size_t>(count) * sizeof(T));
}

// Copies two arrays, contiguously, in one transfer.
template <class First, class Second>
void Upload(Device& device, Buffer& to, std::span<const First> first, std::span<const Second> second,
            std::vector<uint8_t>& staged) {
  staged.resize(first.size_bytes() + second.size_bytes());
  if (staged.empty()) return;
  if (!first.empty()) std::memcpy(staged.data(), first.data(), first.size_bytes());
  std::memcpy(staged.data() + first.size_bytes(), second.data(), second.size_bytes());
  device.CopyIn(to.data(), staged.data(), staged.size());
}

// Rows of captured graphs: 1, 2, 4, 8, 16, 24, ... Tiles of linear layers have 8 rows, so that padding costs little.
int64_t BucketOf(int64_t rows, int64_t limit) {
  constexpr int64_t kStep = 8;
  int64_t bucket = RoundUp(rows, kStep);
  for (const int64_t small : {4, 2, 1}) {
    if (rows <= small) bucket = small;
  }
  return std::min(bucket, limit);
}

}  // namespace

Runner::Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows, Graphs graphs)
    : model_(model),
      max_rows_(max_rows),
      max_logit_rows_(max_logit_rows),
      graphs_(SamplesOnDevice() ? graphs : Graphs::kNone) {
  Device& device = model.ops().device();
  const int64_t hidden = model.Config().hidden, vocab = model.Config().vocab;
  slots_.push_back({.hidden = AllocateArray<float>(device, HiddenFloats(max_rows))});
  hidden_ = slots_.front().hidden.as<float>();
  logits_ = AllocateArray<float>(device, max_logit_rows * vocab);
  inputs_ = device.Allocate(static_cast<size_t>(max_rows) * (2 * sizeof(int64_t) + sizeof(int32_t)));
  if (SamplesOnDevice()) {
    gathered_ = AllocateArray<float>(device, max_logit_rows * hidden);
    const auto rows = static_cast<size_t>(max_logit_rows);
    sample_inputs_ = device.Allocate(rows * (sizeof(kernels::SampleParams) + sizeof(int64_t)));
    samples_ = device.Allocate(rows * (sizeof(kernels::RowArgmax) + sizeof(int32_t)));
    host_logits_ = device.AllocateHost(logits_.bytes());
    host_samples_ = device.AllocateHost(samples_.bytes());
  }
  tokens_.reserve(static_cast<size_t>(max_rows));
  positions_.reserve(static_cast<size_t>(2 * max_rows));
  output_rows_.reserve(static_cast<size_t>(max_rows));
  argmaxes_.resize(static_cast<size_t>(max_logit_rows));
}

void Runner::KeepHiddenStates() {
  assert(!SamplesOnDevice() && !sender_);
  all_hidden_ = AllocateArray<float>(model_.ops().device(), HiddenFloats(max_rows_));
}

void Runner::SetHiddenState(int64_t row, std::span<const float> values) noexcept {
  std::ranges::copy(values, hidden_ + HiddenFloats(row));
}

void Runner::SetStepSender(std::unique_ptr<StepSender> sender) {
  sender_ = std::move(sender);
  if (!sender_->IsPipeline()) return;
  pipeline_ = &sender_->Ranks();
  while (std::ssize(slots_) < sender_->Depth() + 1) {
    slots_.push_back({.hidden = AllocateArray<float>(model_.ops().device(), HiddenFloats(max_rows_))});
  }
}

void Runner::Finish(Ticket ticket) {
  const std::optional<CpuScope> cpus = StepCpus();
  const int64_t oldest = std::max<int64_t>(0, next_ - std::ssize(slots_));
  for (Ticket each = oldest; each <= ticket; ++each) {  // they arrive in their order
    Slot& slot = SlotOf(each);
    if (slot.arrived) continue;
    pipeline_->Receive(pipeline_->Size() - 1, slot.hidden.data(), BytesOfRows(std::max<int64_t>(1, slot.output_rows)));
    slot.arrived = true;
  }
  hidden_ = SlotOf(ticket).hidden.as<float>();
  if (sender_) sender_->Check();
}

Runner::Ticket Runner::Begin(std::span<const RunItem> items, attention::Backend& backend) {
  tokens_.clear();
  positions_.clear();
  output_rows_.clear();
  spans_.clear();
  for (const RunItem& item : items) {
    for (int64_t i = item.first_output; i < std::ssize(item.tokens); ++i) {
      output_rows_.push_back(std::ssize(tokens_) + i);
    }
    tokens_.insert(tokens_.end(), item.tokens.begin(), item.tokens.end());
    for (size_t i = 0; i < item.tokens.size(); ++i) positions_.push_back(item.start + static_cast<int64_t>(i));
    spans_.push_back({.start = item.start,
                      .tokens = static_cast<int>(item.tokens.size()),
                      .drafts = item.drafts,
                      .pages = item.pages});
  }
  assert(static_cast<int64_t>(tokens_.size()) <= max_rows_);
  const bool all_output = output_rows_.size() == tokens_.size();
  const bool decodes = graphs_ != Graphs::kNone && all_output && !items.empty() &&
                       std::ranges::all_of(items, [](const RunItem& item) { return item.tokens.size() == 1; });
  const int64_t bucket = decodes ? BucketOf(std::ssize(tokens_), max_rows_) : 0;
  if (planned_for_ != &backend) plan_.reset();  // a plan belongs to its backend
  planned_for_ = &backend;
  plan_ = backend.MakePlan({.sequences = spans_, .bucket = bucket}, std::move(plan_));
  const std::optional<CpuScope> cpus = StepCpus();
  if (sender_) sender_->SendForward(items);
  const bool first = pipeline_ == nullptr || pipeline_->Rank() == 0;
  const bool last = pipeline_ == nullptr || pipeline_->Rank() == pipeline_->Size() - 1;
  const auto output_rows = std::ssize(output_rows_);
  if (!last) output_rows_.clear();
  const bool keeps_all = all_output || !last;
  if (decodes) {  // padding
    tokens_.resize(static_cast<size_t>(bucket), 0);
    positions_.resize(static_cast<size_t>(bucket), 0);
  }
  if (!keeps_all) positions_.insert(positions_.end(), output_rows_.begin(), output_rows_.end());
  Upload<int64_t, int32_t>(model_.ops().device(), inputs_, positions_, tokens_, staged_);
  const std::span numbers(inputs_.as<const int64_t>(), positions_.size());
  models::ForwardBatch batch{
      .tokens = std::span(reinterpret_cast<const int32_t*>(numbers.data() + numbers.size()), tokens_.size()),
      .positions = numbers.first(tokens_.size())};
  if (!keeps_all) batch.output_rows = numbers.subspan(tokens_.size());
  if (all_hidden_) batch.all_hidden = all_hidden_.as<float>();
  Slot& slot = SlotOf(next_);
  slot = {.output_rows = output_rows, .arrived = last, .hidden = std::move(slot.hidden)};
  auto* hidden = slot.hidden.as<float>();
  int64_t first_row = 0;
  for (const RunItem& item : items) {
    if (item.hidden != nullptr) {
      std::copy_n(item.hidden, HiddenFloats(std::ssize(item.tokens)), hidden + HiddenFloats(first_row));
    }
    first_row += std::ssize(item.tokens);
  }
  if (!first) pipeline_->Receive(pipeline_->Rank() - 1, hidden, BytesOfRows(std::ssize(tokens_)));
  const auto forward = [&] { model_.Forward(batch, backend, *plan_, hidden); };
  if (decodes) {
    ReplayOrCapture(forward_graphs_, bucket, plan_->Version(), forward);
  } else {
    forward();
  }
  if (pipeline_ != nullptr) {
    // One row is sent where there is no output, to tell that the batch is done.
    const int64_t sent = last ? std::max<int64_t>(1, output_rows) : std::ssize(tokens_);
    pipeline_->Send((pipeline_->Rank() + 1) % pipeline_->Size(), hidden, BytesOfRows(sent));
  }
  if (sender_) sender_->Check();
  return next_++;
}

void Runner::AcceptDrafts(std::span<const int> accepted, attention::Backend& backend) noexcept {
  assert(planned_for_ == &backend && pipeline_ == nullptr);
  if (std::ranges::all_of(accepted, [](int drafts) { return drafts == 0; })) return;
  backend.AcceptDrafts(*plan_, accepted);
  model_.AdvanceStates(backend, *plan_);
}

void Runner::ModelLogits(int64_t first, int64_t count, float* out, kernels::RowArgmax* argmaxes) {
  const std::optional<CpuScope> cpus = StepCpus();
  if (sender_ && !sender_->IsPipeline()) sender_->SendLogits(first, count, false);  // a pipeline's has the head
  model_.Logits(hidden_ + HiddenFloats(first), count, out, argmaxes);
  if (sender_) sender_->Check();
}

// The first launches are not captured: they load the kernels, which a capture may not.
void Runner::ReplayOrCapture(CapturedGraphs& graphs, int64_t rows, uint64_t version,
                             const std::function<void()>& launches) {
  CapturedGraph& captured = graphs[rows];
  if (captured.graph && captured.version == version) return captured.graph->Run();
  launches();
  try {
    captured.graph = model_.ops().Capture(launches);
    captured.version = version;
  } catch (const ResourceError&) {  // no memory for a graph; the launches run without it
    if (graphs_ == Graphs::kRequired) throw;
    graphs_ = Graphs::kNone;
    captured.graph.reset();
  }
}

std::span<float> Runner::Logits(int64_t first, int64_t count) {
  assert(count <= max_logit_rows_);
  auto* out = (SamplesOnDevice() ? host_logits_ : logits_).as<float>();
  Logits(first, count, out);
  return {out, static_cast<size_t>(count * model_.Config().vocab)};
}

void Runner::Logits(int64_t first, int64_t count, float* out) {
  if (!SamplesOnDevice()) return ModelLogits(first, count, out, nullptr);
  assert(count <= max_logit_rows_);
  ModelLogits(first, count, logits_.as<float>(), nullptr);
  const auto floats = static_cast<size_t>(count * model_.Config().vocab);
  model_.ops().device().CopyOut(out, logits_.data(), floats * sizeof(float));
}

std::span<const float> Runner::HiddenStates(int64_t first, int64_t count) {
  const int64_t hidden = model_.Config().hidden;
  const float* rows = hidden_ + first * hidden;
  const auto floats = static_cast<size_t>(count * hidden);
  if (!SamplesOnDevice()) return {rows, floats};
  host_hidden_.resize(floats);
  model_.ops().device().CopyOut(host_hidden_.data(), rows, floats * sizeof(float));
  return host_hidden_;
}

void Runner::Logits(int64_t first, std::span<SampleRow> rows) {
  assert(std::ssize(rows) <= max_logit_rows_);
  const auto vocab = static_cast<size_t>(model_.Config().vocab);
  if (SamplesOnDevice()) {
    SampleOnDevice(first, rows);
  } else {
    ModelLogits(first, std::ssize(rows), logits_.as<float>(), argmaxes_.data());
  }
  float* logits = SamplesOnDevice() ? host_logits_.as<float>() : logits_.as<float>();
  for (size_t row = 0; row < rows.size(); ++row) {
    rows[row].logits = {logits + row * vocab, vocab};
    rows[row].argmax = argmaxes_[row];
  }
}

void Runner::SetSampledRows(int64_t first, int64_t count) {
  const int64_t launched = graphs_ == Graphs::kNone ? count : BucketOf(count, max_logit_rows_);
  sampled_rows_.assign(static_cast<size_t>(launched), first);
  sample_params_.assign(static_cast<size_t>(launched), {});
  for (int64_t row = 0; row < count; ++row) sampled_rows_[static_cast<size_t>(row)] = first + row;
}

void Runner::LaunchLogits(bool samples) {
  kernels::Ops& ops = model_.ops();
  const auto count = std::ssize(sampled_rows_);
  Upload<kernels::SampleParams, int64_t>(ops.device(), sample_inputs_, sample_params_, sampled_rows_, staged_);
  const auto* params = sample_inputs_.as<const kernels::SampleParams>();
  const auto* device_rows = reinterpret_cast<const int64_t*>(params + count);
  auto* argmaxes = samples_.as<kernels::RowArgmax>();
  auto* tokens = reinterpret_cast<int32_t*>(argmaxes + max_logit_rows_);
  const auto launches = [&, this] {
    ops.Gather(hidden_, model_.Config().hidden, device_rows, count, gathered_.as<float>());
    model_.Logits(gathered_.as<float>(), count, logits_.as<float>(), argmaxes);
    if (!samples) return;
    ops.Sample(logits_.as<float>(), count, model_.Config().vocab, argmaxes, params, tokens);
    ops.device().CopyOutAsync(host_samples_.data(), samples_.data(), samples_.bytes());
  };
  if (graphs_ != Graphs::kNone) {
    ReplayOrCapture(sample_graphs_, count, 0, launches);
  } else {
    launches();
  }
}

// Launches logits and sampling of all rows, and brings what the host reads.
void Runner::SampleOnDevice(int64_t first, std::span<SampleRow> rows) {
  const std::optional<CpuScope> cpus = StepCpus();
  SetSampledRows(first, std::ssize(rows));
  for (size_t row = 0; row < rows.size(); ++row) {
    sample_params_[row] = rows[row].device_params.value_or(kernels::SampleParams{});
  }
  if (sender_) sender_->SendLogits(first, std::ssize(rows), true);
  LaunchLogits(true);
  if (sender_) sender_->Check();
  FetchSamples(rows);
}

void Runner::FollowLogits(int64_t first, int64_t count, bool for_samples) {
  if (for_samples) {
    SetSampledRows(first, count);
    LaunchLogits(false);
  } else {
    model_.Logits(hidden_ + HiddenFloats(first), count, logits_.as<float>(), nullptr);
  }
  model_.ops().device().Synchronize();
}

// Copies samples and the logits that the host reads; one wait, unless some row cannot be sampled on the device.
void Runner::FetchSamples(std::span<SampleRow> rows) {
  Device& device = model_.ops().device();
  const size_t row_bytes = static_cast<size_t>(model_.Config().vocab) * sizeof(float);
  const auto fetch_row = [&](size_t row) {
    device.CopyOutAsync(host_logits_.data() + row * row_bytes, logits_.data() + row * row_bytes, row_bytes);
  };
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!rows[row].device_params) fetch_row(row);
  }
  device.Synchronize();
  const auto* argmaxes = host_samples_.as<kernels::RowArgmax>();
  const auto* tokens = reinterpret_cast<const int32_t*>(argmaxes + max_logit_rows_);
  std::copy_n(argmaxes, rows.size(), argmaxes_.begin());
  bool more = false;
  for (size_t row = 0; row < rows.size(); ++row) {
    if (!rows[row].device_params) continue;
    rows[row].sampled_on_device = argmaxes[row].finite && tokens[row] >= 0;
    if (rows[row].sampled_on_device) {
      rows[row].token = tokens[row];
    } else {  // invalid logits, or more candidates than the device has room for: left to the host
      fetch_row(row);
      more = true;
    }
  }
  if (more) device.Synchronize();
}

}  // namespace kvanta::runner
