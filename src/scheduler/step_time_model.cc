#include "scheduler/step_time_model.h"

#include <algorithm>
#include <cmath>

namespace kvanta::scheduler {
namespace {

constexpr double kNoise = 0.08;            // standard deviation of a step's time, as a share of it
constexpr double kForgetting = 0.003;      // growth of the uncertainty in a step
constexpr double kLoadWeight = 0.2;        // of a step in the load
constexpr double kCorrection = 0.3;        // standard deviation of a correction, as a share of a step's time
constexpr double kOutlier = 3;             // standard deviations
constexpr double kBestRow = 0.9;           // of the best time of a row until now: no row is predicted to take less
constexpr double kBestRowGrowth = 1.0005;  // of that time in a step: machines become slower, too

double SumTo(double count) {
  return count * (count + 1) / 2;
}

// Sum of visible keys over queries [start, end), whose query i sees min(i + 1, span) keys (full: i + 1).
double WindowPairs(double start, double end, double span) {
  const double ramp = std::clamp(span, start, end);
  return SumTo(ramp) - SumTo(start) + (end - ramp) * span;
}

}  // namespace

StepTimeModel::StepTimeModel(const cache::KvCacheSpec& spec) {
  double layers = 0;
  for (const cache::KvCacheGroup& group : spec.groups) {
    if (group.IsRecurrent()) continue;
    groups_.push_back({group.visibility, static_cast<double>(group.layers.size())});
    layers += groups_.back().share;
  }
  for (Group& group : groups_) group.share /= layers;
}

void StepTimeModel::Add(StepWork& work, int64_t start, int64_t tokens, int64_t logits) const noexcept {
  work.rows += static_cast<double>(tokens);
  work.logits += static_cast<double>(logits);
  const auto begin = static_cast<double>(start), end = static_cast<double>(start + tokens);
  for (const Group& group : groups_) {
    const double span = group.visibility.IsFull() ? end : group.visibility.span;
    work.pairs += group.share * WindowPairs(begin, end, span);
    work.loads += group.share * std::min(end, span + end - begin);
  }
}

StepTimeModel::Features StepTimeModel::FeaturesOf(const StepWork& work) const noexcept {
  const double rows = std::max(1.0, work.rows);
  Features features{{1, work.rows, work.pairs, work.loads, work.logits}};
  features.knot = std::min(static_cast<int>(std::log2(rows)), kKnots - 1);
  if (features.knot + 1 < kKnots) features.upper = rows / std::exp2(features.knot) - 1;
  return features;
}

double StepTimeModel::Unloaded(const Features& features) const noexcept {
  double seconds = 0;
  features.ForEach([&](int i, double factor) { seconds += coefficients_[static_cast<size_t>(i)] * factor; });
  return seconds;
}

double StepTimeModel::Seconds(const StepWork& work) const noexcept {
  return measured_rows_ == 0 ? 0 : std::max(kBestRow * best_row_ * work.rows, load_ * Unloaded(FeaturesOf(work)));
}

// Before the first step, nothing is known but the order of magnitude: its time may be any part's.
void StepTimeModel::Begin(const StepWork& work, double seconds) noexcept {
  const double row = seconds / std::max(1.0, work.rows);
  for (int knot = 0; knot < kKnots; ++knot) {
    deviation_[size_t{kLinear} + static_cast<size_t>(knot)] = kCorrection * std::max(seconds, row * std::exp2(knot));
  }
  deviation_[0] = seconds;
  deviation_[1] = row;
  deviation_[2] = row / 1000;  // a row of linear layers is worth thousands of pairs
  deviation_[3] = row / 100;
  deviation_[4] = row;
  covariance_.fill(0);
  for (int i = 0; i < kSize; ++i) {
    const double deviation = deviation_[static_cast<size_t>(i)];
    Covariance(i, i) = deviation * deviation;
  }
}

void StepTimeModel::Record(const StepWork& work, double seconds) noexcept {
  if (!(seconds > 0) || !(work.rows > 0)) return;
  if (measured_rows_ == 0) Begin(work, seconds);
  const Features features = FeaturesOf(work);
  const bool is_first = measured_rows_ == 0;
  measured_rows_ = std::max(measured_rows_, work.rows);
  const double row_seconds = seconds / work.rows;
  best_row_ = is_first ? row_seconds : std::min(best_row_ * kBestRowGrowth, row_seconds);

  std::array<double, kSize> gain = {};  // covariance * features
  for (int row = 0; row < kSize; ++row) {
    features.ForEach([&](int i, double factor) { gain[static_cast<size_t>(row)] += Covariance(row, i) * factor; });
  }
  double variance = 0;
  features.ForEach([&](int i, double factor) { variance += gain[static_cast<size_t>(i)] * factor; });
  const double expected = load_ * Unloaded(features);
  const double noise = kNoise * (is_first || expected <= 0 ? seconds : expected) / load_;
  const double total = std::max(0.0, variance) + noise * noise;
  const double limit = kOutlier * std::sqrt(total) * load_;
  const double error = std::clamp(seconds - expected, -limit, limit);
  for (int i = 0; i < kSize; ++i)
    coefficients_[static_cast<size_t>(i)] += gain[static_cast<size_t>(i)] * error / load_ / total;
  for (int row = 0; row < kSize; ++row) {
    for (int column = 0; column < kSize; ++column) {
      Covariance(row, column) -= gain[static_cast<size_t>(row)] * gain[static_cast<size_t>(column)] / total;
    }
  }
  for (int i = 0; i < kSize; ++i) {
    const double prior = deviation_[static_cast<size_t>(i)] * deviation_[static_cast<size_t>(i)];
    double grow = std::sqrt(1 + kForgetting);
    const double own = Covariance(i, i) * grow * grow;
    if (own > prior) grow *= std::sqrt(prior / own);
    for (int j = 0; j < kSize; ++j) {
      Covariance(i, j) *= grow;
      Covariance(j, i) *= grow;
    }
  }
  // The machine's load explains the rest, in as far as the coefficients are certain themselves.
  if (!is_first && expected > 0) {
    const double certain = noise * noise / total;
    load_ *= 1 + kLoadWeight * certain * std::clamp(error / expected, -0.5, 0.5);
    load_ = std::clamp(load_, 0.2, 5.0);
  }
}

}  // namespace kvanta::scheduler
