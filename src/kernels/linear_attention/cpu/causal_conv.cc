#include "kernels/linear_attention/cpu/causal_conv.h"

#include <algorithm>
#include <span>

namespace kvanta::kernels {

using cache::StateSegment;

void Convolve(const CausalConv& conv, const ConvTask& task, const cache::StateStep& states, int64_t sequence) noexcept {
  const std::span<const StateSegment> segments = states.OfSequence(static_cast<size_t>(sequence));
  const int64_t begin = segments.front().first_row, end = segments.back().first_row + segments.back().tokens;
  const int past = conv.taps - 1;
  const auto in_state = [&](int i) { return conv.state_offset + i * conv.channels + task.channel; };
  // Inputs before the step: a copy, since a state may be overwritten in place.
  alignas(64) float history[kMaxConvWidth * kConvChannels];
  const float* state = states.State(segments.front().from);
  for (int i = 0; i < past; ++i) {
    float* to = history + i * kConvChannels;
    if (state == nullptr) {
      std::fill_n(to, task.count, 0.0F);
    } else {
      std::copy_n(state + in_state(i), task.count, to);
    }
  }
  const auto input = [&](int64_t row) {
    if (row < begin) return static_cast<const float*>(history) + (row - begin + past) * kConvChannels;
    return task.input + row * task.stride;
  };
  const float* bias = conv.bias == nullptr ? nullptr : conv.bias + task.channel;
  for (int64_t row = begin; row < end && conv.out != nullptr; ++row) {
    const float* inputs[kMaxConvWidth];
    for (int tap = 0; tap <= past; ++tap) inputs[tap] = input(row - past + tap);
    conv.kernel(inputs, {.weights = conv.weights + task.channel, .stride = conv.channels, .bias = bias}, conv.taps,
                task.count, conv.out + row * conv.channels + task.channel);
  }
  for (const StateSegment& segment : segments) {
    if (segment.to == cache::kNoPage) continue;
    float* to = states.State(segment.to);
    for (int i = 0; i < past; ++i) {
      std::copy_n(input(segment.first_row + segment.tokens - past + i), task.count, to + in_state(i));
    }
  }
}

}  // namespace kvanta::kernels
