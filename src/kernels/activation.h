// Activation of a gated MLP.
#pragma once

#include <cstdint>

namespace kvanta::kernels {

// kSilu: x / (1 + exp(-x)). kGeluTanh (gelu_pytorch_tanh): x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), where
// u = sqrt(2 / pi) * (x + 0.044715 x^3). kSwigluOai (GPT-OSS): x / (1 + exp(-1.702 x)) of the gate x, cut off above 7,
// times 1 + up, where up is cut off below -7 and above 7.
enum class Activation : uint8_t { kSilu, kGeluTanh, kSwigluOai };

inline constexpr float kSwigluOaiAlpha = 1.702F;
inline constexpr float kSwigluOaiLimit = 7.0F;

inline constexpr float kGeluLinear = -1.5957691216F;    // -2 sqrt(2 / pi)
inline constexpr float kGeluCubic = -0.0713548162726F;  // 0.044715 of it

}  // namespace kvanta::kernels
