// Row kernels in plain C++, the same on all units: of models that are few, and of a small part of their time.
#pragma once

#include <array>
#include <cstdint>

namespace kvanta::kernels {

// out = x - mean(x); may alias. The order of the sum depends on n alone.
inline void SubtractMean(const float* x, int64_t n, float* out) noexcept {
  constexpr int64_t kLanes = 16;
  std::array<float, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[static_cast<size_t>(lane)] += x[i + lane];
  }
  double sum = 0;
  for (const float lane : sums) sum += lane;
  for (; i < n; ++i) sum += x[i];
  const auto mean = static_cast<float>(sum / static_cast<double>(n));
  for (int64_t j = 0; j < n; ++j) out[j] = x[j] - mean;
}

inline void SquaredReluRow(float* x, int64_t n) noexcept {
  for (int64_t i = 0; i < n; ++i) {
    const float value = x[i] < 0 ? 0 : x[i];  // NaN stays NaN
    x[i] = value * value;
  }
}

}  // namespace kvanta::kernels
