// Gated DeltaNet: linear attention whose state is updated by the gated delta rule, after a short causal convolution of
// queries, keys and values. Yang et al., "Gated Delta Networks"; transformers:
// models/qwen3_next/modeling_qwen3_next.py. Kimi Delta Attention: the same with a decay of each channel of keys, and a
// sigmoid in the output's gate. Kimi Team, "Kimi Linear"; models/kimi_linear/modeling_kimi_linear.py.
#pragma once

#include <cstdint>
#include <span>

#include "cache/recurrent_state.h"
#include "formats/state_codec.h"
#include "kernels/linear_attention/causal_conv.h"

namespace kvanta::kernels {

struct GatedDeltaNetShape {
  int k_heads = 0;  // heads of queries and keys
  int v_heads = 0;  // a multiple of k_heads
  // Heads of values that share a head of queries and keys are k_heads apart (llama.cpp's order); else they are
  // adjacent.
  bool tiled_v_heads = false;
  int k_dim = 0, v_dim = 0;
  int conv_width = 0;          // taps, the token's own input included
  bool channel_decay = false;  // each channel of a head's keys has a decay; else the head has one
  // With channel_decay, of a decay's logarithm, below 0: it is the bound times a sigmoid; 0: a rate times a softplus.
  float decay_lower_bound = 0;

  bool operator==(const GatedDeltaNetShape&) const = default;
  int KeyHead(int v_head) const noexcept { return tiled_v_heads ? v_head % k_heads : v_head / (v_heads / k_heads); }
  int64_t KeyWidth() const noexcept { return int64_t{k_heads} * k_dim; }
  int64_t ValueWidth() const noexcept { return int64_t{v_heads} * v_dim; }
  int64_t ConvWidth() const noexcept { return 2 * KeyWidth() + ValueWidth(); }  // channels: q | k | v
  // Gates of a token: b, and a or a gate of each channel's decay.
  int64_t GatesWidth() const noexcept { return v_heads * (DecayDim() + 1); }
  // Floats of a token that a state advances by: inputs of the convolution, gates.
  int64_t InputWidth() const noexcept { return ConvWidth() + GatesWidth(); }
  int64_t DecayDim() const noexcept { return channel_decay ? k_dim : 1; }      // decays of a head
  int64_t FactorWidth() const noexcept { return v_heads * (DecayDim() + 1); }  // decays of all heads, and betas
  // A sequence's state, f32: [v_heads][k_dim][v_dim], then the inputs of the convolution, [conv_width -
  // 1][ConvWidth()].
  int64_t RuleFloats() const noexcept { return ValueWidth() * k_dim; }
  formats::StateShape State() const noexcept {
    return {.matrices = v_heads, .rows = k_dim, .columns = v_dim, .others = (conv_width - 1) * ConvWidth()};
  }
};

inline constexpr int kMaxDeltaHeadDim = 256;  // k_dim and v_dim; multiples of 8

// Adjacent channels of the convolution's input in a projected row. The convolution's channels are one run, or q, k and
// v of each head of keys.
struct ChannelRun {
  int64_t channel = 0;    // channel of the convolution
  int64_t projected = 0;  // in the projected row
  int64_t count = 0;
};

// A value of each head in a projected row: heads in groups of `per_group`, which are `group_stride` apart.
struct HeadOffsets {
  int64_t first = 0;
  int64_t per_group = 1;
  int64_t group_stride = 0;
  int64_t stride = 0;  // in a group

  constexpr int64_t At(int64_t head) const noexcept {
    return first + head / per_group * group_stride + head % per_group * stride;
  }
};

// One layer in a step, or its states alone over rows whose outputs were computed before. All rows are f32.
struct GatedDeltaNetOp {
  GatedDeltaNetShape shape;
  int64_t rows = 0;
  // Projected rows: inputs of the convolution, and z; and b and a, which beta and the decay are computed from.
  const float* projected = nullptr;
  int64_t projected_stride = 0;
  std::span<const ChannelRun> runs = {};
  HeadOffsets z = {};
  const float* gates = nullptr;
  int64_t gates_stride = 0;
  HeadOffsets b, a;
  // With decays of channels, in place of a and of z: [rows][v_heads * k_dim] with a stride, and [rows][ValueWidth()] of
  // the sigmoid.
  const float* channel_gates = nullptr;
  int64_t channel_gates_stride = 0;
  const float* output_gates = nullptr;
  // Weights.
  const float* conv = nullptr;     // [conv_width][ConvWidth()]
  const float* dt_bias = nullptr;  // [v_heads * DecayDim()]
  const float* decay = nullptr;    // [v_heads]: -exp(A_log)
  const float* norm = nullptr;     // [v_dim]
  float eps = 0;                   // epsilon of the norm
  cache::StateStep states;
  // Scratch: [rows][ConvWidth()] and [rows][FactorWidth()].
  float* mixed = nullptr;
  float* factors = nullptr;
  float* out = nullptr;      // [rows][ValueWidth()]: normed and gated
  bool states_only = false;  // z, output_gates and `norm` are not read, and `out` is scratch
};

}  // namespace kvanta::kernels
