#include "runner/runner.h"

#include <cassert>
#include <cstring>

namespace kvanta::runner {
namespace {

Buffer Floats(int64_t rows, int64_t width) {
  return Cpu().Allocate(static_cast<size_t>(rows * width) * sizeof(float));
}

}  // namespace

Runner::Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows)
    : model_(model),
      max_rows_(max_rows),
      max_logit_rows_(max_logit_rows),
      hidden_(Floats(max_rows, model.Config().hidden)),
      gathered_(Floats(max_logit_rows, model.Config().hidden)),
      logits_(Floats(max_logit_rows, model.Config().vocab)) {
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
  model_.Forward({.tokens = tokens_, .positions = positions_}, backend, *plan_, hidden_.as<float>());
}

std::span<float> Runner::Logits(std::span<const int64_t> rows) {
  assert(static_cast<int64_t>(rows.size()) <= max_logit_rows_);
  const auto hidden = static_cast<size_t>(model_.Config().hidden);
  const auto vocab = static_cast<size_t>(model_.Config().vocab);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::memcpy(gathered_.as<float>() + i * hidden, hidden_.as<float>() + static_cast<size_t>(rows[i]) * hidden,
                hidden * sizeof(float));
  }
  peaks_.resize(rows.size());
  model_.Logits(gathered_.as<float>(), static_cast<int64_t>(rows.size()), logits_.as<float>(), peaks_.data());
  return {logits_.as<float>(), rows.size() * vocab};
}

void Runner::Logits(int64_t first, int64_t rows, float* out) {
  model_.Logits(hidden_.as<float>() + first * model_.Config().hidden, rows, out, nullptr);
}

}  // namespace kvanta::runner
