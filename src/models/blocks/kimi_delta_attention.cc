// Kimi Delta Attention in place of attention: Gated DeltaNet with decays of channels, which are projected, as the
// output gates are, at once or through a few channels (kernels/linear_attention/gated_delta_net.h).
#include <fmt/format.h>

#include <algorithm>

#include "models/blocks/draft_rows.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/recurrent_weights.h"

namespace kvanta::models {
namespace {

using kernels::ChannelRun;
using kernels::GatedDeltaNetOp;
using kernels::GatedDeltaNetShape;

class KimiDeltaAttention final : public AttentionBlock {
 public:
  KimiDeltaAttention(const BlockSource& source, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        shape_(source.config.gated_delta_net),
        drafts_(source.ops.device(), source.max_draft_rows, shape_.InputWidth()) {
    const std::string module = fmt::format("{}{}.", prefix, config_.names.attention);
    const auto read = [&](std::initializer_list<const char*> names, int64_t out, int64_t in) {
      std::vector<StackedWeight> stack;
      for (const char* name : names) stack.push_back({module + name, out});
      const kernels::LinearKind kind{source.store, kInt16Activations};
      return stack.size() == 1 ? source.reader.Linear({stack[0]}, in, false, kind)
                               : source.reader.Linear({stack[0], stack[1], stack[2]}, in, false, kind);
    };
    projection_ = read({"q_proj", "k_proj", "v_proj"}, Width(), config_.hidden);
    beta_ = read({"b_proj"}, shape_.v_heads, config_.hidden);
    if (config_.low_rank_gates) {
      to_decays_ = read({"f_a_proj"}, shape_.k_dim, config_.hidden);
      decays_ = read({"f_b_proj"}, Width(), shape_.k_dim);
      to_gates_ = read({"g_a_proj"}, shape_.k_dim, config_.hidden);
      gates_ = read({"g_b_proj"}, Width(), shape_.k_dim);
    } else {
      decays_ = read({"f_proj"}, Width(), config_.hidden);
      gates_ = read({"g_proj"}, Width(), config_.hidden);
    }
    conv_ = Upload(source, ReadConvolutions(source, module));
    dt_bias_ = source.reader.Vector(module + "dt_bias", Width());
    decay_ = Upload(source, ReadDecay(source, module, shape_.v_heads));
    norm_ = source.reader.Vector(module + "o_norm.weight", shape_.v_dim);
    out_ = source.reader.Linear({{module + std::string(config_.names.attention_out), config_.hidden}}, Width(), false,
                                source.store);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * shape_.ConvWidth());
    betas_ = scratch.Take(rows * shape_.v_heads);
    if (config_.low_rank_gates) low_ = scratch.Take(rows * shape_.k_dim);
    channel_gates_ = scratch.Take(rows * Width());
    output_gates_ = scratch.Take(rows * Width());
    mixed_ = scratch.Take(rows * shape_.ConvWidth());
    factors_ = scratch.Take(rows * shape_.FactorWidth());
    values_ = scratch.Take(rows * Width());
  }

  const kernels::Linear* Reader() const noexcept override { return projection_.get(); }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    const int64_t rows = step.rows;
    projection_->Forward(x, rows, projected_, shape_.ConvWidth());
    beta_->Forward(x, rows, betas_, shape_.v_heads);
    Project(to_decays_.get(), *decays_, x, rows, channel_gates_);
    Project(to_gates_.get(), *gates_, x, rows, output_gates_);
    GatedDeltaNetOp op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = rows;
    op.projected = projected_;
    op.projected_stride = shape_.ConvWidth();
    op.gates = betas_;
    op.gates_stride = shape_.v_heads;
    op.channel_gates = channel_gates_;
    op.channel_gates_stride = Width();
    op.output_gates = output_gates_;
    op.norm = norm_.as<float>();
    op.eps = static_cast<float>(config_.rms_eps);
    ops_.GatedDeltaNet(op);
    drafts_.Keep(ops_, op.states, projected_, shape_.ConvWidth(), shape_.ConvWidth(), 0);
    drafts_.Keep(ops_, op.states, betas_, shape_.v_heads, shape_.v_heads, shape_.ConvWidth());
    drafts_.Keep(ops_, op.states, channel_gates_, Width(), Width(), shape_.ConvWidth() + shape_.v_heads);
    out_->Forward(values_, rows, out, config_.hidden);
  }

  void AdvanceStates(const AttentionStep& step) noexcept override {
    GatedDeltaNetOp op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = DraftRows::Count(op.states);
    op.projected = drafts_.Rows();
    op.gates = drafts_.Rows() + shape_.ConvWidth();
    op.channel_gates = op.gates + shape_.v_heads;
    op.projected_stride = op.gates_stride = op.channel_gates_stride = drafts_.Width();
    op.states_only = true;
    ops_.GatedDeltaNet(op);
  }

 private:
  int64_t Width() const { return shape_.ValueWidth(); }  // of q, of k and of v

  // x [rows][hidden] -> out [rows][Width()], through k_dim channels where there is `to_low`.
  void Project(const kernels::Linear* to_low, const kernels::Linear& linear, const float* x, int64_t rows,
               float* out) noexcept {
    if (to_low != nullptr) to_low->Forward(x, rows, low_, shape_.k_dim);
    linear.Forward(to_low != nullptr ? low_ : x, rows, out, Width());
  }

  // Weights and scratch.
  GatedDeltaNetOp OpOf(const cache::StateStep& states) const noexcept {
    return {.shape = shape_,
            .runs = runs_,
            .z = {},
            .b = {.first = 0, .group_stride = 1},
            .a = {},
            .conv = conv_.as<float>(),
            .dt_bias = dt_bias_.as<float>(),
            .decay = decay_.as<float>(),
            .states = states,
            .mixed = mixed_,
            .factors = factors_,
            .out = values_};
  }

  std::vector<float> ReadConvolutions(const BlockSource& source, const std::string& module) const {
    const int64_t width = Width(), channels = shape_.ConvWidth();
    std::vector<float> conv(static_cast<size_t>(shape_.conv_width * channels));
    int64_t first = 0;
    for (const char* name : {"q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"}) {
      const std::vector<float> part = ReadConvolution(source, module + name, width, shape_.conv_width);
      for (int64_t tap = 0; tap < shape_.conv_width; ++tap) {
        std::copy_n(part.begin() + tap * width, width, conv.begin() + tap * channels + first);
      }
      first += width;
    }
    return conv;
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const GatedDeltaNetShape shape_;  // k_heads = v_heads, k_dim = v_dim
  DraftRows drafts_;
  std::unique_ptr<kernels::Linear> projection_;          // hidden -> q | k | v
  std::unique_ptr<kernels::Linear> beta_;                // hidden -> heads
  std::unique_ptr<kernels::Linear> to_decays_, decays_;  // hidden -> k_dim -> width; hidden -> width without the first
  std::unique_ptr<kernels::Linear> to_gates_, gates_;    // the same, of the output's gates
  std::vector<ChannelRun> runs_ = {{.channel = 0, .projected = 0, .count = shape_.ConvWidth()}};
  Buffer conv_;     // f32 [taps][channels]
  Buffer dt_bias_;  // f32 [width]
  Buffer decay_;    // f32 [heads]
  Buffer norm_;     // f32 [v_dim]
  std::unique_ptr<kernels::Linear> out_;
  // Scratch, f32 [rows][...]:
  float* projected_ = nullptr;
  float* betas_ = nullptr;
  float* low_ = nullptr;  // k_dim, of low_rank_gates
  float* channel_gates_ = nullptr;
  float* output_gates_ = nullptr;
  float* mixed_ = nullptr;
  float* factors_ = nullptr;
  float* values_ = nullptr;
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadKimiDelta(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<KimiDeltaAttention>(source, prefix);
}

}  // namespace kvanta::models
