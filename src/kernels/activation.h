// Activation of a gated MLP.
#pragma once

#include <cstdint>

namespace kvanta::kernels {

// kSilu: x / (1 + exp(-x)). kGeluTanh (gelu_pytorch_tanh): x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), where
// u = sqrt(2 / pi) * (x + 0.044715 x^3).
enum class Activation : uint8_t { kSilu, kGeluTanh };

inline constexpr float kGeluLinear = -1.5957691216F;    // -2 sqrt(2 / pi)
inline constexpr float kGeluCubic = -0.0713548162726F;  // 0.044715 of it

}  // namespace kvanta::kernels
