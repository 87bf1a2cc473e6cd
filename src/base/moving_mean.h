// Exponential moving mean of measurements: times and rates that change slowly.
#pragma once

namespace kvanta {

class MovingMean {
 public:
  // weight: of a new value, above 0 and at most 1. The first value counts wholly.
  explicit constexpr MovingMean(double weight) noexcept : weight_(weight) {}

  constexpr void Add(double value) noexcept { mean_ += (mean_ == 0 ? 1 : weight_) * (value - mean_); }
  // 0: nothing was measured.
  constexpr double Value() const noexcept { return mean_; }

 private:
  double weight_;
  double mean_ = 0;
};

}  // namespace kvanta
