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
    ops_.CheckMamba2();
    WeightReader& reader = source.reader;
    const std::string module = prefix + std::string(config_.names.mamba2) + ".";
    in_ = reader.Linear({{module + "in_proj", shape_.ProjectedWidth()}}, config_.hidden, config_.mamba2.in_bias,
                        {source.store, kInt16Activations});
    conv_ = ReadConvolution(source, module + "conv1d.weight", shape_.ConvWidth(), shape_.conv_width);
    ScaleConvolution();
    if (config_.mamba2.conv_bias) conv_bias_ = reader.KeptValues(module + "conv1d.bias", shape_.ConvWidth());
    dt_bias_ = reader.KeptValues(module + "dt_bias", shape_.heads);
    decay_ = ReadDecay(source, module, shape_.heads);
    d_ = reader.KeptValues(module + "D", shape_.heads);
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
    drafts_.Keep(op.states, op.inputs, op.stride, shape_.InputWidth(), 0);
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
            .conv = conv_.data(),
            .conv_bias = conv_bias_.empty() ? nullptr : conv_bias_.data(),
            .dt_bias = dt_bias_.data(),
            .decay = decay_.data(),
            .d = d_.data(),
            .states = states,
            .mixed = mixed_,
            .factors = factors_,
            .out = values_};
  }

  // The factors of x, b and c: the convolution is linear.
  void ScaleConvolution() {
    const Mamba2Config& mamba2 = config_.mamba2;
    const int64_t groups = int64_t{shape_.groups} * shape_.state_size, channels = shape_.ConvWidth();
    for (size_t i = 0; i < conv_.size(); ++i) {
      const int64_t channel = static_cast<int64_t>(i) % channels;
      conv_[i] *= channel < shape_.Width()            ? mamba2.x_scale
                  : channel < shape_.Width() + groups ? mamba2.b_scale
                                                      : mamba2.c_scale;
    }
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::Mamba2Shape shape_;
  std::unique_ptr<kernels::Linear> in_;  // hidden -> z, x, b, c and dt
  std::vector<float> conv_;              // [taps][channels]
  std::vector<float> conv_bias_;         // [channels], or none
  std::vector<float> dt_bias_, decay_, d_;
  Buffer norm_;  // f32 [width], or none
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
