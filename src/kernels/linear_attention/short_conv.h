// Gated short convolution: a causal depthwise convolution of B * x, whose output is gated by C. Liquid AI, "LFM2
// Technical Report"; transformers: models/lfm2/modeling_lfm2.py.
#pragma once

#include <cstdint>

#include "cache/recurrent_state.h"
#include "formats/state_codec.h"
#include "kernels/linear_attention/causal_conv.h"

namespace kvanta::kernels {

struct ShortConvShape {
  int channels = 0;
  int conv_width = 0;  // taps, the token's own input included

  bool operator==(const ShortConvShape&) const = default;
  int64_t InputWidth() const noexcept { return channels; }  // floats of a token that a state advances by: B * x
  // A sequence's state, f32: the last inputs of the convolution, [conv_width - 1][channels].
  formats::StateShape State() const noexcept { return {.others = int64_t{conv_width - 1} * channels}; }
};

// One layer in a step, or its states alone over rows whose outputs were computed before. All rows are f32.
struct ShortConvOp {
  ShortConvShape shape;
  int64_t rows = 0;
  // Rows of `channels` floats, `stride` floats apart. x null: b has the products already, and the states alone are
  // stored.
  float* b = nullptr;  // becomes B * x
  const float *c = nullptr, *x = nullptr;
  int64_t stride = 0;
  const float* conv = nullptr;  // [conv_width][channels]
  const float* bias = nullptr;  // [channels]; null: none
  cache::StateStep states;
  float* out = nullptr;  // [rows][channels]: C * (convolution of B * x)
};

}  // namespace kvanta::kernels
