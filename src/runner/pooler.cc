#include "runner/pooler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kvanta/error.h"

namespace kvanta {

void PoolingParams::Validate(int embedding_size) const {
  if (dimensions < 0 || dimensions > embedding_size) {
    throw InputError(fmt::format("dimensions = {}: must be between 1 and the model's hidden size, {}, or 0 (all)",
                                 dimensions, embedding_size),
                     "dimensions");
  }
}

namespace runner {
namespace {

constexpr double kMinNorm = 1e-12;  // torch.nn.functional.normalize's: zeros stay zeros

}  // namespace

Pooler::Pooler(const PoolingParams& params, int64_t hidden_size, double hidden_scale,
               std::span<const models::DenseModule> modules)
    : params_(params), hidden_size_(hidden_size), hidden_scale_(hidden_scale), modules_(modules) {}

int64_t Pooler::FirstRow(int64_t tokens, bool last) const noexcept {
  if (ReadsEveryToken()) return 0;
  return last ? tokens - 1 : tokens;
}

void Pooler::Add(int64_t start, std::span<const float> rows) {
  if (start == 0 || sum_.empty()) {
    sum_.assign(static_cast<size_t>(hidden_size_), 0.0);
    rows_ = 0;
  }
  for (; !rows.empty(); rows = rows.subspan(sum_.size())) {
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += static_cast<double>(rows[i]);
    ++rows_;
  }
}

std::vector<float> Pooler::Finish() const {
  std::vector<double> pooled(sum_.begin(), sum_.end());
  for (double& value : pooled) value = value / static_cast<double>(rows_) * hidden_scale_;
  for (const models::DenseModule& module : modules_) pooled = module.Forward(pooled);
  if (params_.dimensions != 0) pooled.resize(static_cast<size_t>(params_.dimensions));
  double squares = 0;
  for (const double value : pooled) squares += value * value;
  if (!std::isfinite(squares)) return {};
  const double norm = params_.normalize ? std::max(std::sqrt(squares), kMinNorm) : 1.0;
  std::vector<float> embedding(pooled.size());
  std::ranges::transform(pooled, embedding.begin(), [&](double value) { return static_cast<float>(value / norm); });
  return embedding;
}

}  // namespace runner
}  // namespace kvanta
