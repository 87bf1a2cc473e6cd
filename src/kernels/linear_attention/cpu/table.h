// Tables of an ISA unit's kernels for recurrent layers.
#pragma once

#include <cstdint>

namespace kvanta::kernels {

inline constexpr int kDeltaColumns = 32;  // columns of a head's state that are computed together

// Consecutive tokens of one head, and a block of its value channels.
struct DeltaTokens {
  const float *q = nullptr, *k = nullptr;  // [k_dim], normed
  const float* v = nullptr;                // [columns]
  float* out = nullptr;                    // [columns]
  int64_t qk_stride = 0, v_stride = 0, out_stride = 0;
  const float *decay = nullptr, *beta = nullptr;  // per token: one or [k_dim], and one
  int64_t factor_stride = 0;
  int tokens = 0;
  int k_dim = 0;    // even
  int columns = 0;  // at most kDeltaColumns
};

// Weights of adjacent channels of a convolution.
struct ConvWeights {
  const float* weights = nullptr;  // of a tap; the taps are `stride` floats apart
  int64_t stride = 0;
  const float* bias = nullptr;  // null: none
};

// out = bias + sum of inputs[i] * weights[i], [n].
using CausalConvKernel = void (*)(const float* const* inputs, const ConvWeights& weights, int taps, int64_t n,
                                  float* out) noexcept;

struct CausalConvKernels {
  CausalConvKernel conv = nullptr;
  CausalConvKernel conv_silu = nullptr;  // silu of it
};

using DeltaRuleKernel = void (*)(const DeltaTokens& tokens, float* state) noexcept;

struct GatedDeltaKernels {
  // x *= scale / sqrt(sum(x^2) + eps), [n].
  void (*l2_norm)(float* x, float scale, float eps, int64_t n) noexcept = nullptr;
  // out = exp(rate * log(1 + exp(x + bias))), all [n].
  void (*channel_decay)(const float* x, const float* bias, float rate, int64_t n, float* out) noexcept = nullptr;
  // out = exp(bound / (1 + exp(rate * (x + bias)))), all [n].
  void (*bounded_channel_decay)(const float* x, const float* bias, float rate, float bound, int64_t n,
                                float* out) noexcept = nullptr;
  // For each token: S *= decay; S += k (beta (v - S^T k))^T; out = S^T q. state S: [k_dim][kDeltaColumns].
  DeltaRuleKernel delta_rule = nullptr;
  DeltaRuleKernel channel_delta_rule = nullptr;  // of decays of the rows of S
};

// Consecutive tokens of one head of Mamba-2, and a block of its channels.
struct ScanTokens {
  const float *b = nullptr, *c = nullptr;       // [state_size]
  const float* x = nullptr;                     // [columns]
  float* out = nullptr;                         // [columns]
  int64_t stride = 0, out_stride = 0;           // of b, c and x; of out
  const float *decay = nullptr, *dt = nullptr;  // one of each per token
  int64_t factor_stride = 0;
  float d = 0;
  int tokens = 0;
  int state_size = 0;  // even
  int columns = 0;     // at most kDeltaColumns
};

struct Mamba2Kernels {
  // For each token: h = decay h + b (dt x)^T; out = h^T c + d x. state h: [state_size][kDeltaColumns].
  void (*scan)(const ScanTokens& tokens, float* state) noexcept = nullptr;
};

}  // namespace kvanta::kernels
