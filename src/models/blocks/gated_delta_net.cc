// Gated DeltaNet in place of attention (kernels/linear_attention/gated_delta_net.h).

#include "models/blocks/draft_rows.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/recurrent_weights.h"

namespace kvanta::models {
namespace {

using kernels::ChannelRun;
using kernels::GatedDeltaNetOp;
using kernels::GatedDeltaNetShape;
using kernels::HeadOffsets;

class GatedDeltaNet final : public AttentionBlock {
 public:
  GatedDeltaNet(const BlockSource& source, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        shape_(source.config.gated_delta_net),
        drafts_(source.ops.device(), source.max_draft_rows, shape_.InputWidth()) {
    const std::string module = prefix + "linear_attn.";
    ReadProjections(source, module);
    conv_ = Upload(source, ReadConvolution(source, module + "conv1d.weight", shape_.ConvWidth(), shape_.conv_width));
    dt_bias_ = source.reader.Vector(module + "dt_bias", shape_.v_heads);
    decay_ = Upload(source, ReadDecay(source, module, shape_.v_heads));
    norm_ = source.reader.Vector(module + "norm.weight", shape_.v_dim);
    out_ = source.reader.Linear({{module + "out_proj", config_.hidden}}, shape_.ValueWidth(), false, source.store);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * ProjectedWidth());
    gates_ = scratch.Take(rows * shape_.GatesWidth());
    mixed_ = scratch.Take(rows * shape_.ConvWidth());
    factors_ = scratch.Take(rows * shape_.FactorWidth());
    values_ = scratch.Take(rows * shape_.ValueWidth());
  }

  const kernels::Linear* Reader() const noexcept override { return projection_.get(); }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    projection_->Forward(x, step.rows, projected_, ProjectedWidth());
    gate_projection_->Forward(x, step.rows, gates_, shape_.GatesWidth());
    GatedDeltaNetOp op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = step.rows;
    op.projected = projected_;
    op.projected_stride = ProjectedWidth();
    op.runs = runs_;
    op.z = z_;
    op.gates = gates_;
    op.gates_stride = shape_.GatesWidth();
    op.norm = norm_.as<float>();
    op.eps = static_cast<float>(config_.rms_eps);
    ops_.GatedDeltaNet(op);
    for (const ChannelRun& run : runs_) {
      drafts_.Keep(ops_, op.states, projected_ + run.projected, op.projected_stride, run.count, run.channel);
    }
    drafts_.Keep(ops_, op.states, gates_, shape_.GatesWidth(), shape_.GatesWidth(), shape_.ConvWidth());
    out_->Forward(values_, step.rows, out, config_.hidden);
  }

  void AdvanceStates(const AttentionStep& step) noexcept override {
    const ChannelRun all{.channel = 0, .projected = 0, .count = shape_.ConvWidth()};
    GatedDeltaNetOp op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = DraftRows::Count(op.states);
    op.projected = drafts_.Rows();
    op.runs = std::span(&all, 1);
    op.gates = drafts_.Rows() + shape_.ConvWidth();
    op.projected_stride = op.gates_stride = drafts_.Width();
    op.states_only = true;
    ops_.GatedDeltaNet(op);
  }

 private:
  int64_t ProjectedWidth() const { return shape_.ConvWidth() + shape_.ValueWidth(); }

  // Weights and scratch.
  GatedDeltaNetOp OpOf(const cache::StateStep& states) const noexcept {
    return {.shape = shape_,
            .b = b_,
            .a = a_,
            .conv = conv_.as<float>(),
            .dt_bias = dt_bias_.as<float>(),
            .decay = decay_.as<float>(),
            .states = states,
            .mixed = mixed_,
            .factors = factors_,
            .out = values_};
  }

  // Checkpoints have q, k, v and z, and b and a, either of all heads or next to each other for each head of keys.
  void ReadProjections(const BlockSource& source, const std::string& module) {
    const int64_t v_heads = shape_.v_heads;
    const auto read = [&](std::initializer_list<StackedWeight> stack) {
      return source.reader.Linear(stack, config_.hidden, false, {source.store, kInt16Activations});
    };
    if (source.reader.HasPrefix(module + "in_proj_qkvz.")) {
      projection_ = read({{module + "in_proj_qkvz", ProjectedWidth()}});
      FindGroups();
    } else {
      projection_ = read({{module + "in_proj_qkv", shape_.ConvWidth()}, {module + "in_proj_z", shape_.ValueWidth()}});
      runs_ = {{.channel = 0, .projected = 0, .count = shape_.ConvWidth()}};
      z_ = {.first = shape_.ConvWidth(), .group_stride = shape_.v_dim};
    }
    if (source.reader.HasPrefix(module + "in_proj_ba.")) {
      gate_projection_ = read({{module + "in_proj_ba", 2 * v_heads}});
      const int64_t values = v_heads / shape_.k_heads;
      b_ = {.first = 0, .per_group = values, .group_stride = 2 * values, .stride = 1};
      a_ = {.first = values, .per_group = values, .group_stride = 2 * values, .stride = 1};
    } else {
      gate_projection_ = read({{module + "in_proj_b", v_heads}, {module + "in_proj_a", v_heads}});
      b_ = {.first = 0, .group_stride = 1};
      a_ = {.first = v_heads, .group_stride = 1};
    }
  }

  // For each head of keys: q, k, and v and z of its heads of values.
  void FindGroups() {
    const int64_t values = shape_.v_heads / shape_.k_heads, value_width = values * shape_.v_dim;
    const int64_t group = ProjectedWidth() / shape_.k_heads, keys = shape_.k_dim;
    for (int64_t head = 0; head < shape_.k_heads; ++head) {
      const int64_t first = head * group;
      runs_.push_back({.channel = head * keys, .projected = first, .count = keys});
      runs_.push_back({.channel = shape_.KeyWidth() + head * keys, .projected = first + keys, .count = keys});
      runs_.push_back(
          {.channel = 2 * shape_.KeyWidth() + head * value_width, .projected = first + 2 * keys, .count = value_width});
    }
    z_ = {.first = 2 * keys + value_width, .per_group = values, .group_stride = group, .stride = shape_.v_dim};
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const GatedDeltaNetShape shape_;
  std::unique_ptr<kernels::Linear> projection_;       // hidden -> q, k, v and z of all heads
  std::unique_ptr<kernels::Linear> gate_projection_;  // hidden -> b and a
  std::vector<ChannelRun> runs_;
  HeadOffsets z_, b_, a_;
  Buffer conv_;             // f32 [taps][channels]
  Buffer dt_bias_, decay_;  // f32 [v_heads]
  Buffer norm_;             // f32 [v_dim]
  std::unique_ptr<kernels::Linear> out_;
  DraftRows drafts_;  // inputs of the convolution, gates
  // Scratch, f32 [rows][...]:
  float* projected_ = nullptr;
  float* gates_ = nullptr;
  float* mixed_ = nullptr;
  float* factors_ = nullptr;
  float* values_ = nullptr;
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadGatedDeltaNet(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<GatedDeltaNet>(source, prefix);
}

}  // namespace kvanta::models
