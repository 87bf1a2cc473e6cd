// Gated short convolution in place of attention (kernels/linear_attention/short_conv.h).
#include "models/blocks/draft_rows.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/recurrent_weights.h"

namespace kvanta::models {
namespace {

class ShortConv final : public AttentionBlock {
 public:
  ShortConv(const BlockSource& source, const std::string& prefix)
      : ops_(source.ops),
        shape_(source.config.short_conv),
        drafts_(source.ops.device(), source.max_draft_rows, shape_.InputWidth()) {
    const std::string module = prefix + "conv.";
    const int64_t channels = shape_.channels;
    const bool bias = source.config.short_conv_bias;
    in_ = source.reader.Linear({{module + "in_proj", 3 * channels}}, channels, bias, {source.store, kInt16Activations});
    conv_ = Upload(source, ReadConvolution(source, module + "conv.weight", channels, shape_.conv_width));
    if (bias) bias_ = source.reader.Vector(module + "conv.bias", channels);
    out_ = source.reader.Linear({{module + "out_proj", channels}}, channels, bias, source.store);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    projected_ = scratch.Take(rows * 3 * shape_.channels);
    mixed_ = scratch.Take(rows * shape_.channels);
  }

  const kernels::Linear* Reader() const noexcept override { return in_.get(); }

  void Forward(const AttentionStep& step, const float* x, float* out) noexcept override {
    in_->Forward(x, step.rows, projected_, int64_t{3} * shape_.channels);
    const cache::StateStep states = step.backend->States(*step.plan, step.layer);
    const int64_t stride = int64_t{3} * shape_.channels;
    ops_.ShortConv({.shape = shape_,
                    .rows = step.rows,
                    .b = projected_,
                    .c = projected_ + shape_.channels,
                    .x = projected_ + int64_t{2} * shape_.channels,
                    .stride = stride,
                    .conv = conv_.as<float>(),
                    .bias = bias_ ? bias_.as<float>() : nullptr,
                    .states = states,
                    .out = mixed_});
    drafts_.Keep(ops_, states, projected_, stride, shape_.channels, 0);
    out_->Forward(mixed_, step.rows, out, shape_.channels);
  }

  void AdvanceStates(const AttentionStep& step) noexcept override {
    const cache::StateStep states = step.backend->States(*step.plan, step.layer);
    ops_.ShortConv({.shape = shape_,
                    .rows = DraftRows::Count(states),
                    .b = drafts_.Rows(),
                    .stride = drafts_.Width(),
                    .states = states});
  }

 private:
  kernels::Ops& ops_;
  const kernels::ShortConvShape shape_;
  std::unique_ptr<kernels::Linear> in_;  // hidden -> B | C | x
  Buffer conv_;                          // f32 [taps][channels]
  Buffer bias_;                          // f32 [channels], or none
  std::unique_ptr<kernels::Linear> out_;
  DraftRows drafts_;  // B * x
  // Scratch, f32 [rows][...]:
  float* projected_ = nullptr;
  float* mixed_ = nullptr;
};

}  // namespace

std::unique_ptr<AttentionBlock> ReadShortConv(const BlockSource& source, const std::string& prefix) {
  return std::make_unique<ShortConv>(source, prefix);
}

}  // namespace kvanta::models
