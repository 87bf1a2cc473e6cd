// Kullback-Leibler divergence between the distributions of two rows of logits.
#pragma once

#include <cmath>
#include <span>

#include "runner/softmax.h"

namespace kvanta::runner {

// KL(reference || other) in nats; NaN when a row is invalid (softmax.h). f32 [vocab] both. Infinite if `other` gives no
// probability to a token that has some in `reference`.
inline double KlDivergence(std::span<const float> reference, std::span<const float> other) noexcept {
  const LogitRange p = FindRange(reference);
  const LogitRange q = FindRange(other);
  if (!p.valid || !q.valid) return NAN;
  const double p_sum = SumExp(reference, p.max);
  const double shift =
      (static_cast<double>(p.max) + std::log(p_sum)) - (static_cast<double>(q.max) + std::log(SumExp(other, q.max)));
  double sum = 0;  // sum of exp(reference - max) * (reference - other): terms are as small as the rows are alike
  for (size_t i = 0; i < reference.size(); ++i) {
    const float weight = ExpOfNegative(reference[i] - p.max);
    if (weight == 0.0F) continue;
    sum += static_cast<double>(weight) * (static_cast<double>(reference[i]) - static_cast<double>(other[i]) - shift);
  }
  return std::max(0.0, sum / p_sum);  // rounding may leave -1e-16 where the rows are equal
}

}  // namespace kvanta::runner
