// Sums of exponentials over a vocabulary, in one fixed order. Written so that the compiler vectorizes it without
// changing that order: eight independent lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "kernels/sampling/sample_params.h"

namespace kvanta::runner {

using kernels::ExpOfNegative;

struct LogitRange {
  float max = 0;
  bool valid = false;  // no NaN, no +infinity, at least one finite value
};

inline LogitRange FindRange(std::span<const float> logits) noexcept {
  constexpr size_t kLanes = 8;
  float max[kLanes];
  float zero[kLanes];  // x - x: 0 when finite, NaN otherwise; -infinity is a masked token
  std::fill(max, max + kLanes, -INFINITY);
  std::fill(zero, zero + kLanes, 0.0F);
  const auto visit = [&](size_t lane, float x) {
    max[lane] = x > max[lane] ? x : max[lane];
    const float finite = x == -INFINITY ? 0.0F : x;
    zero[lane] += finite - finite;
  };
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) visit(lane, logits[i + lane]);
  }
  for (; i < logits.size(); ++i) visit(i % kLanes, logits[i]);
  LogitRange range{-INFINITY, true};
  for (size_t lane = 0; lane < kLanes; ++lane) {
    range.max = std::max(range.max, max[lane]);
    range.valid = range.valid && zero[lane] == 0.0F;
  }
  range.valid = range.valid && std::isfinite(range.max);
  return range;
}

// Sum of exp((x - max) * scale) over x >= threshold.
inline double SumExp(std::span<const float> logits, float max, float scale = 1.0F,
                     float threshold = -INFINITY) noexcept {
  constexpr size_t kLanes = 8;
  double sum[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= logits.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float x = logits[i + lane];
      const float term = ExpOfNegative((x - max) * scale);
      sum[lane] += static_cast<double>(x >= threshold ? term : 0.0F);
    }
  }
  for (; i < logits.size(); ++i) {
    if (logits[i] >= threshold) sum[i % kLanes] += static_cast<double>(ExpOfNegative((logits[i] - max) * scale));
  }
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

}  // namespace kvanta::runner
