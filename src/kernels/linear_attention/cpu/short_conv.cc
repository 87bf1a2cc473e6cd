#include "kernels/linear_attention/cpu/short_conv.h"

#include <algorithm>

#include "base/math.h"
#include "kernels/linear_attention/cpu/causal_conv.h"

namespace kvanta::kernels {

void CpuShortConv(const ShortConvOp& op, const IsaTable& isa, ThreadPool& threads) noexcept {
  const int64_t channels = op.shape.channels, stride = 3 * channels, blocks = CeilDiv(channels, kConvChannels);
  const CausalConv conv{.kernel = isa.causal_conv.conv,
                        .taps = op.shape.conv_width,
                        .weights = op.conv,
                        .bias = op.bias,
                        .channels = channels,
                        .out = op.out};
  auto convolve = [&](int64_t task, int) {
    const int64_t sequence = task / blocks, channel = task % blocks * kConvChannels;
    const int64_t count = std::min(kConvChannels, channels - channel);
    const auto segments = op.states.OfSequence(static_cast<size_t>(sequence));
    const int64_t begin = segments.front().first_row, end = segments.back().first_row + segments.back().tokens;
    float* b = op.projected + channel;
    const float *c = b + channels, *x = c + channels;
    for (int64_t row = begin; row < end; ++row) isa.rows.mul(b + row * stride, x + row * stride, count);
    Convolve(conv, {.channel = channel, .count = count, .input = b, .stride = stride}, op.states, sequence);
    for (int64_t row = begin; row < end; ++row) {
      isa.rows.mul(op.out + row * channels + channel, c + row * stride, count);
    }
  };
  threads.ForEach(std::ssize(op.states.first_segments) * blocks, convolve);
}

}  // namespace kvanta::kernels
