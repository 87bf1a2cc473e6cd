#include "kernels/linear_attention/cpu/gated_delta_net.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "kernels/linear_attention/cpu/causal_conv.h"
#include "kernels/linear_attention/cpu/for_columns.h"

namespace kvanta::kernels {
namespace {

using cache::StateSegment;

constexpr float kNormEps = 1e-6F;  // epsilon of the norm of queries and keys

class GatedDeltaNet {
 public:
  GatedDeltaNet(const GatedDeltaNetOp& op, const IsaTable& isa, ThreadPool& threads)
      : op_(op), shape_(op.shape), isa_(isa), threads_(threads), sequences_(std::ssize(op.states.first_segments)) {}

  void Run() noexcept {
    int64_t blocks = 0;
    for (const ChannelRun& run : op_.runs) blocks += CeilDiv(run.count, kConvChannels);
    auto convolve = [&](int64_t task, int) { ConvolveBlock(task / blocks, task % blocks); };
    threads_.ForEach(sequences_ * blocks, convolve);
    auto prepare = [&](int64_t row, int) { NormalizeAndGate(row); };
    threads_.ForEach(op_.rows, prepare);
    ForColumns(threads_, sequences_ * shape_.v_heads, shape_.v_dim, [&](int64_t head, int64_t column) {
      UpdateState(head / shape_.v_heads, head % shape_.v_heads, column);
    });
    if (op_.states_only) return;
    auto norm = [&](int64_t row, int) { NormRow(row); };
    threads_.ForEach(op_.rows, norm);
  }

 private:
  // A block of channels of a sequence's convolution.
  void ConvolveBlock(int64_t sequence, int64_t block) noexcept {
    const ChannelRun* run = op_.runs.data();
    for (; block >= CeilDiv(run->count, kConvChannels); ++run) block -= CeilDiv(run->count, kConvChannels);
    const int64_t first = block * kConvChannels;
    Convolve({.kernel = isa_.causal_conv.conv_silu,
              .taps = shape_.conv_width,
              .weights = op_.conv,
              .channels = shape_.ConvWidth(),
              .state_offset = shape_.RuleFloats(),
              .out = op_.mixed},
             {.channel = run->channel + first,
              .count = std::min(kConvChannels, run->count - first),
              .input = op_.projected + run->projected + first,
              .stride = op_.projected_stride},
             op_.states, sequence);
  }

  // Norms queries and keys, and computes each head's decay and beta.
  void NormalizeAndGate(int64_t row) noexcept {
    float* q = op_.mixed + row * shape_.ConvWidth();
    float* k = q + shape_.KeyWidth();
    const float query_scale = 1.0F / std::sqrt(static_cast<float>(shape_.k_dim));
    for (int head = 0; head < shape_.k_heads; ++head) {
      isa_.gated_delta.l2_norm(q + head * shape_.k_dim, query_scale, kNormEps, shape_.k_dim);
      isa_.gated_delta.l2_norm(k + head * shape_.k_dim, 1.0F, kNormEps, shape_.k_dim);
    }
    const float* gates = op_.gates + row * op_.gates_stride;
    float* decay = op_.factors + row * shape_.FactorWidth();
    float* beta = decay + shape_.v_heads * shape_.DecayDim();
    for (int head = 0; head < shape_.v_heads; ++head) {
      beta[head] = 1.0F / (1.0F + std::exp(-gates[op_.b.At(head)]));
      if (shape_.channel_decay) {
        DecayChannels(head, op_.channel_gates + row * op_.channel_gates_stride, decay);
        continue;
      }
      const float x = gates[op_.a.At(head)] + op_.dt_bias[head];
      const float softplus = x > 20.0F ? x : std::log1p(std::exp(x));  // PyTorch's threshold
      decay[head] = std::exp(op_.decay[head] * softplus);
    }
  }

  // Decays of a head's channels; `gates` and `decays`: of all heads.
  void DecayChannels(int head, const float* gates, float* decays) const noexcept {
    const int64_t first = head * shape_.DecayDim();
    const float rate = op_.decay[head], bound = shape_.decay_lower_bound;
    if (bound == 0) {
      isa_.gated_delta.channel_decay(gates + first, op_.dt_bias + first, rate, shape_.k_dim, decays + first);
    } else {
      isa_.gated_delta.bounded_channel_decay(gates + first, op_.dt_bias + first, rate, bound, shape_.k_dim,
                                             decays + first);
    }
  }

  // The delta rule over all tokens of a sequence, for a head's value channels from `column` on.
  void UpdateState(int64_t sequence, int64_t head, int64_t column) noexcept {
    const std::span<const StateSegment> segments = op_.states.OfSequence(static_cast<size_t>(sequence));
    const int k_dim = shape_.k_dim, v_dim = shape_.v_dim;
    const auto columns = static_cast<int>(std::min<int64_t>(kDeltaColumns, v_dim - column));
    const int64_t in_state = head * k_dim * v_dim + column;
    alignas(64) float block[kMaxDeltaHeadDim * kDeltaColumns];
    std::fill_n(block, k_dim * kDeltaColumns, 0.0F);
    if (const float* from = op_.states.State(segments.front().from); from != nullptr) {
      for (int i = 0; i < k_dim; ++i) std::copy_n(from + in_state + i * v_dim, columns, block + i * kDeltaColumns);
    }
    const int64_t k_head = shape_.KeyHead(static_cast<int>(head));
    for (const StateSegment& segment : segments) {
      const float* row = op_.mixed + segment.first_row * shape_.ConvWidth();
      const float* factors = op_.factors + segment.first_row * shape_.FactorWidth();
      const DeltaTokens tokens{.q = row + k_head * k_dim,
                               .k = row + shape_.KeyWidth() + k_head * k_dim,
                               .v = row + 2 * shape_.KeyWidth() + head * v_dim + column,
                               .out = op_.out + segment.first_row * shape_.ValueWidth() + head * v_dim + column,
                               .qk_stride = shape_.ConvWidth(),
                               .v_stride = shape_.ConvWidth(),
                               .out_stride = shape_.ValueWidth(),
                               .decay = factors + head * shape_.DecayDim(),
                               .beta = factors + shape_.v_heads * shape_.DecayDim() + head,
                               .factor_stride = shape_.FactorWidth(),
                               .tokens = segment.tokens,
                               .k_dim = k_dim,
                               .columns = columns};
      delta_rule_(tokens, block);
      if (segment.to == cache::kNoPage) continue;
      float* to = op_.states.State(segment.to) + in_state;
      for (int i = 0; i < k_dim; ++i) std::copy_n(block + i * kDeltaColumns, columns, to + i * v_dim);
    }
  }

  void NormRow(int64_t row) noexcept {
    for (int head = 0; head < shape_.v_heads; ++head) {
      float* out = op_.out + row * shape_.ValueWidth() + head * shape_.v_dim;
      isa_.rows.rms_norm(out, op_.norm, op_.eps, shape_.v_dim, out);
      if (shape_.channel_decay) continue;
      isa_.rows.silu_mul(op_.projected + row * op_.projected_stride + op_.z.At(head), out, shape_.v_dim, out);
    }
    if (!shape_.channel_decay) return;
    const int64_t width = shape_.ValueWidth();
    isa_.rows.mul_sigmoid(op_.out + row * width, op_.output_gates + row * width, width);
  }

  const GatedDeltaNetOp& op_;
  const GatedDeltaNetShape& shape_;
  const IsaTable& isa_;
  ThreadPool& threads_;
  int64_t sequences_;
  const DeltaRuleKernel delta_rule_ =
      shape_.channel_decay ? isa_.gated_delta.channel_delta_rule : isa_.gated_delta.delta_rule;
};

}  // namespace

void CpuGatedDeltaNet(const GatedDeltaNetOp& op, const IsaTable& isa, ThreadPool& threads) noexcept {
  GatedDeltaNet(op, isa, threads).Run();
}

}  // namespace kvanta::kernels
