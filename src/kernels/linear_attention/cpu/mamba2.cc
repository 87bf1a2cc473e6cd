#include "kernels/linear_attention/cpu/mamba2.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "base/math.h"
#include "kernels/linear_attention/cpu/causal_conv.h"
#include "kernels/linear_attention/cpu/for_columns.h"

namespace kvanta::kernels {
namespace {

using cache::StateSegment;

class Mamba2 {
 public:
  Mamba2(const Mamba2Op& op, const IsaTable& isa, ThreadPool& threads)
      : op_(op), shape_(op.shape), isa_(isa), threads_(threads) {}

  void Run() noexcept {
    const int64_t sequences = std::ssize(op_.states.first_segments);
    const int64_t blocks = CeilDiv(shape_.ConvWidth(), kConvChannels);
    auto convolve = [&](int64_t task, int) { ConvolveBlock(task / blocks, task % blocks * kConvChannels); };
    threads_.ForEach(sequences * blocks, convolve);
    auto prepare = [&](int64_t row, int) { ReadFactors(row); };
    threads_.ForEach(op_.rows, prepare);
    ForColumns(threads_, sequences * shape_.heads, shape_.head_dim,
               [&](int64_t head, int64_t column) { UpdateState(head / shape_.heads, head % shape_.heads, column); });
    if (op_.z == nullptr) return;
    auto gate = [&](int64_t row, int) { GateRow(row); };
    threads_.ForEach(op_.rows, gate);
  }

 private:
  // Channels of a sequence's convolution from `channel` on.
  void ConvolveBlock(int64_t sequence, int64_t channel) noexcept {
    Convolve({.kernel = isa_.causal_conv.conv_silu,
              .taps = shape_.conv_width,
              .weights = op_.conv,
              .bias = op_.conv_bias,
              .channels = shape_.ConvWidth(),
              .state_offset = shape_.ScanFloats(),
              .out = op_.mixed},
             {.channel = channel,
              .count = std::min(kConvChannels, shape_.ConvWidth() - channel),
              .input = op_.inputs + channel,
              .stride = op_.stride},
             op_.states, sequence);
  }

  // Each head's decay and dt.
  void ReadFactors(int64_t row) noexcept {
    const float* projected = op_.inputs + row * op_.stride + shape_.ConvWidth();
    float* decay = op_.factors + row * 2 * shape_.heads;
    float* dt = decay + shape_.heads;
    for (int head = 0; head < shape_.heads; ++head) {
      const float x = projected[head] * op_.dt_scale + op_.dt_bias[head];
      const float softplus = x > 20.0F ? x : std::log1p(std::exp(x));  // PyTorch's threshold
      dt[head] = std::clamp(softplus, shape_.min_dt, shape_.max_dt);
      decay[head] = std::exp(op_.decay[head] * dt[head]);
    }
  }

  // The scan over all tokens of a sequence, for a head's channels from `column` on.
  void UpdateState(int64_t sequence, int64_t head, int64_t column) noexcept {
    const std::span<const StateSegment> segments = op_.states.OfSequence(static_cast<size_t>(sequence));
    const int state_size = shape_.state_size, head_dim = shape_.head_dim;
    const auto columns = static_cast<int>(std::min<int64_t>(kDeltaColumns, head_dim - column));
    const int64_t in_state = head * state_size * head_dim + column;
    alignas(64) float block[kMaxMamba2StateSize * kDeltaColumns];
    std::fill_n(block, state_size * kDeltaColumns, 0.0F);
    if (const float* from = op_.states.State(segments.front().from); from != nullptr) {
      for (int i = 0; i < state_size; ++i) {
        std::copy_n(from + in_state + i * head_dim, columns, block + i * kDeltaColumns);
      }
    }
    const int64_t group = head / (shape_.heads / shape_.groups);
    for (const StateSegment& segment : segments) {
      const float* row = op_.mixed + segment.first_row * shape_.ConvWidth();
      const float* b = row + shape_.Width() + group * state_size;
      const float* factors = op_.factors + segment.first_row * 2 * shape_.heads + head;
      const ScanTokens tokens{.b = b,
                              .c = b + int64_t{shape_.groups} * state_size,
                              .x = row + head * head_dim + column,
                              .out = op_.out + segment.first_row * shape_.Width() + head * head_dim + column,
                              .stride = shape_.ConvWidth(),
                              .out_stride = shape_.Width(),
                              .decay = factors,
                              .dt = factors + shape_.heads,
                              .factor_stride = int64_t{2} * shape_.heads,
                              .d = op_.d[head],
                              .tokens = segment.tokens,
                              .state_size = state_size,
                              .columns = columns};
      isa_.mamba2.scan(tokens, block);
      if (segment.to == cache::kNoPage) continue;
      float* to = op_.states.State(segment.to) + in_state;
      for (int i = 0; i < state_size; ++i) std::copy_n(block + i * kDeltaColumns, columns, to + i * head_dim);
    }
  }

  void GateRow(int64_t row) noexcept {
    const int64_t width = shape_.Width(), group = shape_.GroupWidth();
    float* out = op_.out + row * width;
    float* z = op_.z + row * op_.stride;
    if (op_.z_scale != 1) isa_.rows.scale(z, op_.z_scale, width);
    if (shape_.gate != Mamba2Gate::kNormBeforeGate) isa_.rows.silu_mul(z, out, width, out);
    if (shape_.gate == Mamba2Gate::kNoNorm) return;
    for (int64_t first = 0; first < width; first += group) {
      isa_.rows.rms_norm(out + first, op_.norm + first, op_.eps, group, out + first);
    }
    if (shape_.gate == Mamba2Gate::kNormBeforeGate) isa_.rows.silu_mul(z, out, width, out);
  }

  const Mamba2Op& op_;
  const Mamba2Shape& shape_;
  const IsaTable& isa_;
  ThreadPool& threads_;
};

}  // namespace

void CpuMamba2(const Mamba2Op& op, const IsaTable& isa, ThreadPool& threads) noexcept {
  Mamba2(op, isa, threads).Run();
}

}  // namespace kvanta::kernels
