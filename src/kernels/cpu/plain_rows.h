// Row kernels in plain C++, the same on all units: of models that are few, and of a small part of their time.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

#include "kernels/activation.h"
#include "kernels/pointwise.h"

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

inline float ActivatePoint(Pointwise activation, const Xielu& xielu, float x) noexcept {
  switch (activation) {
    case Pointwise::kGelu:
      return 0.5F * x * std::erfc(-x / std::numbers::sqrt2_v<float>);
    case Pointwise::kGeluTanh:
      return x / (1 + std::exp(x * (x * x * kGeluCubic + kGeluLinear)));
    case Pointwise::kRelu:
      return x < 0 ? 0 : x;  // NaN stays NaN
    case Pointwise::kSquaredRelu:
      return x < 0 ? 0 : x * x;
    case Pointwise::kXielu:
      break;
  }
  // transformers cuts x off above -1e-6 in its exponential: a difference below 1e-6 alpha_n.
  return (x > 0 ? xielu.alpha_p * x * x : xielu.alpha_n * (std::expm1(x) - x)) + xielu.beta * x;
}

// out = min(silu(gate), limit) * up, where up is cut off below -limit and above it, all [width]; `silu_mul` is silu(x)
// times y of the unit. NaN stays NaN.
template <class SiluMul>
void LimitedSiluMulRow(const SiluMul& silu_mul, const float* gate, const float* up, float limit, int64_t width,
                       float* out) noexcept {
  constexpr int64_t kCount = 64;
  static constexpr auto kOnes = [] {
    std::array<float, kCount> ones{};
    ones.fill(1);
    return ones;
  }();
  for (int64_t first = 0; first < width; first += kCount) {
    const int64_t count = std::min(kCount, width - first);
    silu_mul(gate + first, kOnes.data(), count, out + first);
    for (int64_t i = first; i < first + count; ++i) {
      const float y = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
      out[i] = (out[i] > limit ? limit : out[i]) * y;
    }
  }
}

// Rotates `heads` of a row back, the inverse of RowKernels::rope_interleaved.
inline void RotateBack(float* x, int heads, int head_dim, int pairs, const float* cos_sin) noexcept {
  for (int head = 0; head < heads; ++head, x += head_dim) {
    for (int i = 0; i < pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1], cosine = cos_sin[i], sine = cos_sin[pairs + i];
      x[2 * i] = a * cosine + b * sine;
      x[2 * i + 1] = b * cosine - a * sine;
    }
  }
}

// x = min(x, limit); NaN stays NaN.
inline void CutOffRowAbove(float* x, int64_t n, float limit) noexcept {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] > limit ? limit : x[i];
}

inline float GateFactor(GateFunction function, float gate) noexcept {
  if (function == GateFunction::kIdentity) return gate;
  if (function == GateFunction::kSigmoid) return 1.0F / (1.0F + std::exp(-gate));
  return std::max(gate, 0.0F) + std::log1p(std::exp(-std::abs(gate)));
}

inline void ActivateRow(Pointwise activation, const Xielu& xielu, float* x, int64_t n) noexcept {
  for (int64_t i = 0; i < n; ++i) x[i] = ActivatePoint(activation, xielu, x[i]);
}

}  // namespace kvanta::kernels
