// Mamba-2: a state space model whose states decay by one factor per head, after a short causal convolution. Dao and Gu,
// "Transformers are SSMs"; transformers: models/bamba/modeling_bamba.py, BambaMixer.
#pragma once

#include <cstdint>
#include <limits>

#include "cache/recurrent_state.h"
#include "kernels/linear_attention/causal_conv.h"

namespace kvanta::kernels {

// Order of the gate by z and of the RMS norm of each group of channels.
enum class Mamba2Gate : uint8_t {
  kNoNorm,          // y silu(z)
  kGateBeforeNorm,  // norm(y silu(z))
  kNormBeforeGate,  // norm(y) silu(z)
};

struct Mamba2Shape {
  int heads = 0;
  int head_dim = 0;
  int groups = 0;  // of heads that share b and c, and of channels that are normed together; a divisor of heads
  int state_size = 0;
  int conv_width = 0;  // taps, the token's own input included
  Mamba2Gate gate = Mamba2Gate::kGateBeforeNorm;
  float min_dt = 0, max_dt = std::numeric_limits<float>::infinity();  // limits of dt after softplus

  bool operator==(const Mamba2Shape&) const = default;
  int64_t Width() const noexcept { return int64_t{heads} * head_dim; }  // of x, of z and of the output
  int64_t GroupWidth() const noexcept { return Width() / groups; }
  int64_t ConvWidth() const noexcept { return Width() + int64_t{2} * groups * state_size; }  // channels: x | b | c
  // Floats of a token that a state advances by: x | b | c | dt.
  int64_t InputWidth() const noexcept { return ConvWidth() + heads; }
  int64_t ProjectedWidth() const noexcept { return Width() + InputWidth(); }  // z | x | b | c | dt
  // A sequence's state, f32: [heads][state_size][head_dim], then the inputs of the convolution, [conv_width -
  // 1][ConvWidth()].
  int64_t ScanFloats() const noexcept { return Width() * state_size; }
  formats::StateShape State() const noexcept {
    return {.matrices = heads, .rows = state_size, .columns = head_dim, .others = (conv_width - 1) * ConvWidth()};
  }
};

inline constexpr int kMaxMamba2StateSize = 256;  // a multiple of 8

// One layer in a step, or its states alone over rows whose outputs were computed before. All rows are f32.
struct Mamba2Op {
  Mamba2Shape shape;
  int64_t rows = 0;
  // Rows `stride` floats apart: z, which is overwritten (null: the states alone, `norm` is not read and `out` is
  // scratch), and x | b | c | dt.
  float* z = nullptr;
  const float* inputs = nullptr;
  int64_t stride = 0;
  // Factors of z and dt.
  float z_scale = 1, dt_scale = 1;
  // Weights.
  const float* conv = nullptr;       // [conv_width][ConvWidth()]
  const float* conv_bias = nullptr;  // [ConvWidth()], or null
  const float* dt_bias = nullptr;    // [heads]
  const float* decay = nullptr;      // [heads]: -exp(A_log)
  const float* d = nullptr;          // [heads]
  const float* norm = nullptr;       // [Width()]; null without a norm
  float eps = 0;                     // epsilon of the norm
  cache::StateStep states;
  // Scratch: [rows][ConvWidth()] and [rows][2 heads].
  float* mixed = nullptr;
  float* factors = nullptr;
  float* out = nullptr;  // [rows][Width()]: gated and normed
};

}  // namespace kvanta::kernels
