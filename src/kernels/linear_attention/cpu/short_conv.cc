#include "kernels/linear_attention/cpu/short_conv.h"

#include <algorithm>

#include "base/math.h"
#include "kernels/linear_attention/cpu/causal_conv.h"

namespace kvanta::kernels {

void CpuShortConv(const ShortConvOp& op, const IsaTable& isa, ThreadPool& threads) noexcept {
  const int64_t channels = op.shape.channels, stride = op.stride, blocks = CeilDiv(channels, kConvChannels);
  const bool states_only = op.x == nullptr;
  const CausalConv conv{.kernel = isa.causal_conv.conv,
                        .taps = op.shape.conv_width,
                        .weights = op.conv,
                        .bias = op.bias,
                        .channels = channels,
                        .out = states_only ? nullptr : op.out};
  auto convolve = [&](int64_t task, int) {
    const int64_t sequence = task / blocks, channel = task % blocks * kConvChannels;
    const int64_t count = std::min(kConvChannels, channels - channel);
    const auto segments = op.states.OfSequence(static_cast<size_t>(sequence));
    const int64_t begin = segments.front().first_row, end = segments.back().first_row + segments.back().tokens;
    float* b = op.b + channel;
    for (int64_t row = begin; row < end && !states_only; ++row) {
      isa.rows.mul(b + row * stride, op.x + row * stride + channel, count);
    }
    Convolve(conv, {.channel = channel, .count = count, .input = b, .stride = stride}, op.states, sequence);
    for (int64_t row = begin; row < end && !states_only; ++row) {
      isa.rows.mul(op.out + row * channels + channel, op.c + row * stride + channel, count);
    }
  };
  threads.ForEach(std::ssize(op.states.first_segments) * blocks, convolve);
}

}  // namespace kvanta::kernels
