// The kernels of one ISA unit that work on one row of activations, f32.
#pragma once

#include <cstdint>

namespace kvanta::kernels {

struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight, all [width]; out may be x. The sum runs over 16 lanes, then a tree.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, float* out) noexcept = nullptr;
  // x += y, both [n].
  void (*add)(float* x, const float* y, int64_t n) noexcept = nullptr;
  // Rotates the pairs (x[i], x[i + half]) of each head by the angle i: `half` cosines, then `half` sines.
  void (*rope)(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept = nullptr;
  // out = silu(gate) * up, all [width].
  void (*silu_mul)(const float* gate, const float* up, int64_t width, float* out) noexcept = nullptr;
  // out = gelu_pytorch_tanh(gate) * up, all [width].
  void (*gelu_mul)(const float* gate, const float* up, int64_t width, float* out) noexcept = nullptr;
  // x *= factor, [n].
  void (*scale)(float* x, float factor, int64_t n) noexcept = nullptr;
  // x = softcap * tanh(x / softcap), [n].
  void (*softcap)(float* x, float softcap, int64_t n) noexcept = nullptr;
  // The largest of x [n], n > 0; NaN if one is NaN or infinite.
  float (*largest)(const float* x, int64_t n) noexcept = nullptr;
  // out[i] = exp(x[i]), [n]: the exponential of every kernel of the unit.
  void (*exp)(const float* x, int64_t n, float* out) noexcept = nullptr;
};

}  // namespace kvanta::kernels
