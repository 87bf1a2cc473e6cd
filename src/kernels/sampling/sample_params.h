// Parameters for sampling a token from a row of logits without mask, bias or penalties.
#pragma once

#include <bit>
#include <cstdint>

#include "base/host_device.h"

namespace kvanta::kernels {

struct SampleParams {
  double uniform = 0;                          // in [0, 1)
  float scale = 0;                             // 1 / temperature; 0: greedy
  float min_logit_offset = -__builtin_inff();  // lowest logit that may be sampled, relative to the largest (min_p)
  int32_t top_k = 0;                           // at most kMaxCandidates; 0: all
  float top_p = 1;
};

// Maximum number of candidates that a GPU sorts for top_k and top_p. Rows whose top_p needs more are sampled on the
// host.
inline constexpr int kMaxCandidates = 2048;

// exp(x) for x <= 0, relative error below 3e-7; 0 below -87. Cody-Waite reduction and a polynomial of degree 6: libm's
// expf is not vectorized, and a vocabulary of 49,152 would cost more than the attention of a short context. The same
// bits on every processor.
KVANTA_HD constexpr float ExpOfNegative(float x) noexcept {
  const float clamped = x < -87.0F ? -87.0F : x;
  const float shifted = clamped * 1.44269504F + 12582912.0F;  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const float n = shifted - 12582912.0F;
  const float r = (clamped - n * 0.693359375F) + n * 2.12194440e-4F;
  float p = 1.0F / 720.0F;
  p = p * r + 1.0F / 120.0F;
  p = p * r + 1.0F / 24.0F;
  p = p * r + 1.0F / 6.0F;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127U) << 23;
  return x < -87.0F ? 0.0F : p * std::bit_cast<float>(exponent);
}

}  // namespace kvanta::kernels
