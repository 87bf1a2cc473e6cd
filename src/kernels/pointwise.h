// Activation of an MLP without a gate, element by element; and functions of gates.
#pragma once

#include <cstdint>

namespace kvanta::kernels {

// kGelu: x times the normal distribution's Phi(x), by the error function. kGeluTanh: Activation::kGeluTanh. kRelu:
// max(x, 0). kSquaredRelu: its square. kXielu: Xielu.
enum class Pointwise : uint8_t { kGelu, kGeluTanh, kRelu, kSquaredRelu, kXielu };

// xIELU (Apertus; arXiv:2411.13010): alpha_p x^2 + beta x for x > 0, else alpha_n (exp(x) - 1 - x) + beta x.
struct Xielu {
  float alpha_p = 0, alpha_n = 0, beta = 0;
};

// Function of a gate that multiplies channels. kSigmoid: 1 / (1 + exp(-x)). kSoftplus: log(1 + exp(x)).
// kIdentity: x.
enum class GateFunction : uint8_t { kSigmoid, kSoftplus, kIdentity };

}  // namespace kvanta::kernels
