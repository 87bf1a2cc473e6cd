// Choice of a token among candidates in descending order: one source for the host and for a GPU.
#pragma once

#include <cstdint>
#include <limits>

#include "base/host_device.h"

namespace kvanta::kernels {

inline constexpr double kAnyMass = std::numeric_limits<double>::infinity();

// The first `count` candidates, and the sum of their probabilities (unnormalized) in that order.
struct CandidateHead {
  int32_t count;
  double mass;
};

// Shortest head of the candidates [0, count), count >= 1, with at least `mass`, else all. prob(i): f32.
template <class Prob>
KVANTA_HD CandidateHead HeadOfMass(const Prob& prob, int32_t count, double mass) {
  double sum = 0;
  for (int32_t i = 0; i < count; ++i) {
    sum += static_cast<double>(prob(i));
    if (sum >= mass) return {i + 1, sum};
  }
  return {count, sum};
}

// Index of the candidate at `uniform` in [0, 1) of the head's cumulative distribution. Rounding may leave the sum below
// the target: then the last one.
template <class Prob>
KVANTA_HD int32_t PickCandidate(const Prob& prob, const CandidateHead& head, double uniform) {
  const double target = uniform * head.mass;
  double sum = 0;
  int32_t index = 0;
  for (; index < head.count - 1; ++index) {
    sum += static_cast<double>(prob(index));
    if (sum > target) break;
  }
  return index;
}

}  // namespace kvanta::kernels
