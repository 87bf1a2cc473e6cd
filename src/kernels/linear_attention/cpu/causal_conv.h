// Causal depthwise convolutions on the CPU: a task computes some adjacent channels of all rows of a sequence, and
// stores their last inputs in the states.
#pragma once

#include <cstdint>

#include "cache/recurrent_state.h"
#include "kernels/linear_attention/causal_conv.h"
#include "kernels/linear_attention/cpu/table.h"

namespace kvanta::kernels {

inline constexpr int64_t kConvChannels = 512;  // channels of a task

struct CausalConv {
  CausalConvKernel kernel = nullptr;
  int taps = 0;                    // at most kMaxConvWidth
  const float* weights = nullptr;  // [taps][channels]
  const float* bias = nullptr;     // [channels]; null: none
  int64_t channels = 0;            // of all tasks together
  int64_t state_offset = 0;        // floats of a state before the inputs, [taps - 1][channels]
  float* out = nullptr;            // [rows][channels]; null: the states alone
};

// At most kConvChannels adjacent channels.
struct ConvTask {
  int64_t channel = 0;           // the first one
  int64_t count = 0;             // channels
  const float* input = nullptr;  // of the first channel in row 0
  int64_t stride = 0;            // floats between rows of the input
};

void Convolve(const CausalConv& conv, const ConvTask& task, const cache::StateStep& states, int64_t sequence) noexcept;

}  // namespace kvanta::kernels
