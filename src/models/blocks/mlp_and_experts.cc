// An MLP and a mixture of experts side by side (Gemma 4): each with norms of its own around it, the router with
// another. transformers: models/gemma4/modeling_gemma4.py, Gemma4TextDecoderLayer.
#include <cmath>
#include <vector>

#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"
#include "models/expert_weights.h"

namespace kvanta::models {
namespace {

class MlpAndExperts final : public MlpBlock {
 public:
  MlpAndExperts(const BlockSource& source, const LayerSpec& spec, const std::string& prefix)
      : ops_(source.ops), config_(source.config), moe_(source.config.moe) {
    const int64_t hidden = config_.hidden;
    const auto read_norm = [&](const char* name) { return Norm(source.reader, config_, prefix + name, hidden); };
    pre_mlp_norm_ = read_norm("pre_feedforward_layernorm");
    post_mlp_norm_ = read_norm("post_feedforward_layernorm_1");
    pre_experts_norm_ = read_norm("pre_feedforward_layernorm_2");
    post_experts_norm_ = read_norm("post_feedforward_layernorm_2");
    router_norm_ = source.reader.Vector(prefix + "router.scale", hidden, 0, 1 / std::sqrt(static_cast<double>(hidden)));
    mlp_ = ReadGatedMlp(source, prefix + "mlp.", {.intermediate_size = spec.intermediate_size});
    // The router stays f32: a small error would choose other experts.
    router_ = source.reader.Linear({{.module = prefix + "router.proj", .out = moe_.num_experts, .whole = true}}, hidden,
                                   false, kernels::WeightType::kF32);
    const std::vector<float> scales = source.reader.KeptValues(prefix + "router.per_expert_scale", moe_.num_experts);
    experts_ = ops_.MakeExperts(ReadExperts(source, prefix), moe_, {.per_expert_scale = scales},
                                {.ranks = &source.ranks, .by_experts = source.expert_parallel});
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    normed_ = scratch.Take(rows * config_.hidden);
    logits_ = scratch.Take(rows * moe_.num_experts);
    experts_out_ = scratch.Take(rows * config_.hidden);
    scratch.OverlapScratch(*mlp_, rows);
  }

  // x: not normed.
  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    mlp_->Forward(Normed(pre_mlp_norm_, x, rows, normed_), rows, out);
    Normed(post_mlp_norm_, out, rows, out);
    const int64_t hidden = config_.hidden;
    ops_.RmsNorm(x, hidden, router_norm_.as<float>(), static_cast<float>(config_.rms_eps), rows, hidden, normed_,
                 hidden);
    router_->Forward(normed_, rows, logits_, moe_.num_experts);
    experts_->Forward(Normed(pre_experts_norm_, x, rows, normed_), logits_, rows, experts_out_);
    Normed(post_experts_norm_, experts_out_, rows, experts_out_);
    ops_.Add(out, experts_out_, rows * config_.hidden);
  }

 private:
  const float* Normed(const Norm& norm, const float* x, int64_t rows, float* out) noexcept {
    norm.Forward(ops_, x, config_.hidden, rows, out, config_.hidden);
    return out;
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::MoeConfig& moe_;
  Norm pre_mlp_norm_, post_mlp_norm_, pre_experts_norm_, post_experts_norm_;
  Buffer router_norm_;  // f32 [hidden]
  std::unique_ptr<MlpBlock> mlp_;
  std::unique_ptr<kernels::Linear> router_;  // hidden -> num_experts
  std::unique_ptr<kernels::ExpertLayer> experts_;
  // Scratch, f32 [rows][...]:
  float* normed_ = nullptr;       // hidden
  float* logits_ = nullptr;       // num_experts
  float* experts_out_ = nullptr;  // hidden
};

}  // namespace

std::unique_ptr<MlpBlock> ReadMlpAndExperts(const BlockSource& source, const LayerSpec& spec,
                                            const std::string& prefix) {
  return std::make_unique<MlpAndExperts>(source, spec, prefix);
}

}  // namespace kvanta::models
