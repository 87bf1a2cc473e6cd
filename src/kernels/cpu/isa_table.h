// The tables of plain functions that an ISA unit (isa_<isa>.cc) exports; one is chosen at run time (select.h).
#pragma once

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/linear/cpu/table.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {

struct AttentionKernels;

using ActivateMulKernel = void (*)(const float* gate, const float* up, int64_t width, float* out) noexcept;

// Kernels over one row of activations, f32.
struct RowKernels {
  // out = x / sqrt(mean(x^2) + eps) * weight, all [width]; out may be x. The sum runs over 16 lanes, then a tree.
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t width, float* out) noexcept = nullptr;
  // x += y, both [n].
  void (*add)(float* x, const float* y, int64_t n) noexcept = nullptr;
  // x *= y, both [n].
  void (*mul)(float* x, const float* y, int64_t n) noexcept = nullptr;
  // Rotates the pairs (x[i], x[i + half]) of each head by the angle i. cos_sin: `half` cosines, then `half` sines.
  void (*rope)(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept = nullptr;
  // The same for the pairs (x[2 i], x[2 i + 1]).
  void (*rope_interleaved)(float* x, int heads, int head_dim, int half, const float* cos_sin) noexcept = nullptr;
  // out = silu(gate) * up, all [width].
  void (*silu_mul)(const float* gate, const float* up, int64_t width, float* out) noexcept = nullptr;
  // out = gelu_pytorch_tanh(gate) * up, all [width].
  void (*gelu_mul)(const float* gate, const float* up, int64_t width, float* out) noexcept = nullptr;
  // out = swiglu_oai(gate, up) of kernels/activation.h, all [width].
  void (*swiglu_oai_mul)(const float* gate, const float* up, int64_t width, float* out) noexcept = nullptr;
  // x += y * factor, both [n]: a product, then a sum.
  void (*add_scaled)(float* x, const float* y, float factor, int64_t n) noexcept = nullptr;
  // x *= factor, [n].
  void (*scale)(float* x, float factor, int64_t n) noexcept = nullptr;
  // x /= 1 + exp(-gate), both [n].
  void (*mul_sigmoid)(float* x, const float* gate, int64_t n) noexcept = nullptr;
  // x = softcap * tanh(x / softcap), [n].
  void (*softcap)(float* x, float softcap, int64_t n) noexcept = nullptr;
  // Maximum of x [n], n > 0; NaN if any element is NaN or infinite.
  float (*max)(const float* x, int64_t n) noexcept = nullptr;
  // out[i] = exp(x[i]), [n]: the exponential that all kernels of the unit use.
  void (*exp)(const float* x, int64_t n, float* out) noexcept = nullptr;

  ActivateMulKernel ActivateMul(Activation activation) const noexcept {
    if (activation == Activation::kSwigluOai) return swiglu_oai_mul;
    return activation == Activation::kSilu ? silu_mul : gelu_mul;
  }
};

struct IsaTable {
  const char* name = nullptr;  // the <isa> of isa_<isa>.cc
  LinearKernels linear;
  RowKernels rows;
  CausalConvKernels causal_conv;
  GatedDeltaKernels gated_delta;
  Mamba2Kernels mamba2;
  const AttentionKernels* attention = nullptr;
};

const IsaTable& PortableTable();
const IsaTable& Avx2Table();
const IsaTable& Avx512Table();
const IsaTable& Avx512Fp16Table();
const IsaTable& Zen4Table();
const IsaTable& AmxTable();
const IsaTable& NeonTable();
const IsaTable& DotprodTable();
const IsaTable& I8mmTable();

// Kernels of linear layers, in units of their own: they take as long to compile as the rest.
const LinearKernels& PortableLinearKernels();
const LinearKernels& Avx2LinearKernels();
const LinearKernels& Avx512LinearKernels() noexcept;  // kernels of the AMX unit call it
const LinearKernels& Zen4LinearKernels();
const LinearKernels& AmxLinearKernels();
const LinearKernels& NeonLinearKernels();
const LinearKernels& DotprodLinearKernels();
const LinearKernels& I8mmLinearKernels();

}  // namespace kvanta::kernels
