// Mamba-2 in place of attention (kernels/linear_attention/mamba2.h).

#include "models/blocks/draft_rows.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/recurrent_weights.h"

namespace kvanta::models {
namespace {

class Mamba2 final : public AttentionBlock {
 public:
  Mamba2(const BlockSource& source, const std::string& prefix)
      : ops_(source.ops),
        config_(source.config),
        shape_(source.config.mamba2.shape),
        drafts_(source.ops.device(), source.max_draft_rows, shape_.InputWidth()) {
    WeightReader& reader = source.reader;
    const std::string module = prefix + std::string(config_.names.mamba2) + ".";
    in_ = reader.Linear({{module + "in_proj", shape_.ProjectedWidth()}}, config_.hidden, config_.mamba2.in_bias,
                        {source.store, kInt16Activations});
    conv_ = Upload(source, ScaledConvolution(source, module + "conv1d.weight"));
    if (config_.mamba2.conv_bias) conv_bias_ = reader.Vector(module + "conv1d.bias", shape_.ConvWidth());
    dt_bias_ = reader.Vector(module + "dt_bias", shape_.heads);
    decay_ = Upload(source, ReadDecay(source, module, shape_.heads));
    d_ = reader.Vector(module + "D", shape_.heads);
    if (shape_.gate != kernels::Mamba2Gate::kNoNorm) norm_ = reader.Vector(module + "norm.weight", shape_.Width());
    out_ =
        reader.Linear({{module + "out_proj", config_.hidden}}, shape_.Width(), config_.mamba2.out_bias, source.store);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * shape_.ProjectedWidth());
    mixed_ = scratch.Take(rows * shape_.ConvWidth());
    factors_ = scratch.Take(rows * 2 * shape_.heads);
    values_ = scratch.Take(rows * shape_.Width());
  }

  const kernels::Linear* Reader() const noexcept override { return in_.get(); }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    in_->Forward(x, step.rows, projected_, shape_.ProjectedWidth());
    kernels::Mamba2Op op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = step.rows;
    op.z = projected_;
    op.inputs = projected_ + shape_.Width();
    op.stride = shape_.ProjectedWidth();
    op.z_scale = config_.mamba2.z_scale;
    op.norm = norm_ ? norm_.as<float>() : nullptr;
    op.eps = static_cast<float>(config_.rms_eps);
    ops_.Mamba2(op);
    drafts_.Keep(ops_, op.states, op.inputs, op.stride, shape_.InputWidth(), 0);
    out_->Forward(values_, step.rows, out, config_.hidden);
  }

  void AdvanceStates(const AttentionStep& step) noexcept override {
    kernels::Mamba2Op op = OpOf(step.backend->States(*step.plan, step.layer));
    op.rows = DraftRows::Count(op.states);
    op.inputs = drafts_.Rows();
    op.stride = drafts_.Width();
    ops_.Mamba2(op);
  }

 private:
  // Weights and scratch.
  kernels::Mamba2Op OpOf(const cache::StateStep& states) const noexcept {
    return {.shape = shape_,
            .dt_scale = config_.mamba2.dt_scale,
            .conv = conv_.as<float>(),
            .conv_bias = conv_bias_ ? conv_bias_.as<float>() : nullptr,
            .dt_bias = dt_bias_.as<float>(),
            .decay = decay_.as<float>(),
            .d = d_.as<float>(),
            .states = states,
            .mixed = mixed_,
            .factors = factors_,
            .out = values_};
  }

  // With the factors of x, b and c: the convolution is linear.
  std::vector<float> ScaledConvolution(const BlockSource& source, const std::string& name) const {
    const Mamba2Config& mamba2 = config_.mamba2;
    const int64_t groups = int64_t{shape_.groups} * shape_.state_size, channels = shape_.ConvWidth();
    std::vector<float> conv = ReadConvolution(source, name, channels, shape_.conv_width);
    for (size_t i = 0; i < conv.size(); ++i) {
      const int64_t channel = static_cast<int64_t>(i) % channels;
      conv[i] *= channel < shape_.Width()            ? mamba2.x_scale
                 : channel < shape_.Width() + groups ? mamba2.b_scale
                                                     : mamba2.c_scale;
    }
    return conv;
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::Mamba2Shape shape_;
  std::unique_ptr<kernels::Linear> in_;  // hidden -> z, x, b, c and dt
  Buffer conv_;                          // f32 [taps][channels]
  Buffer conv_bias_;                     // f32 [channels], or none
  Buffer dt_bias_, decay_, d_;           // f32 [heads]
  Buffer norm_;                          // f32 [width], or none
  std::unique_ptr<kernels::Linear> out_;
  DraftRows drafts_;  // x | b | c | dt
  // Scratch, f32 [rows][...]:
  float* projected_ = nullptr;
  float* mixed_ = nullptr;
  float* factors_ = nullptr;
  float* values_ = nullptr;
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadMamba2(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<Mamba2>(source, prefix);
}

}  // namespace kvanta::models
