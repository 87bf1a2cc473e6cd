// Mixture of experts: a router chooses some of many small MLPs for each row, or for its projection to a latent; shared
// experts serve all rows.
#include <fmt/format.h>

#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "kvanta/error.h"
#include "models/blocks/layer_blocks.h"
#include "models/blocks/recurrent_weights.h"
#include "models/expert_weights.h"

namespace kvanta::models {
namespace {

class MixtureOfExperts final : public MlpBlock {
 public:
  MixtureOfExperts(const BlockSource& source, const LayerSpec& spec, const std::string& prefix,
                   const std::string& module)
      : ops_(source.ops), config_(source.config), moe_(ConfigOf(source, spec)) {
    const TensorNames& names = config_.names;
    const auto name_of = [&](std::string_view part) { return module + std::string(part); };
    // The router stays f32: a small error would choose other experts.
    router_ = source.reader.Linear({{.module = name_of(names.router), .out = moe_.num_experts, .whole = true}},
                                   config_.hidden, moe_.bias, kernels::WeightType::kF32);
    const std::vector<float> correction =
        spec.hash_moe ? std::vector<float>() : ReadCorrection(source, name_of(names.correction_bias));
    if (spec.hash_moe) ReadTable(source, name_of("gate.tid2eid"));
    experts_ = ops_.MakeExperts(ReadExperts(source, module), moe_, {.e_score_correction_bias = correction},
                                {.ranks = &source.ranks, .by_experts = source.expert_parallel});
    if (moe_.moe_latent_size != 0) {
      const auto read = [&](std::string_view part, int64_t out, int64_t in) {
        return source.reader.Linear({{.module = name_of(part), .out = out, .whole = true}}, in, config_.mlp.bias,
                                    source.store);
      };
      to_latent_ = read("fc1_latent_proj", moe_.moe_latent_size, config_.hidden);
      from_latent_ = read("fc2_latent_proj", config_.hidden, moe_.moe_latent_size);
    }
    const int64_t shared_width = moe_.shared_expert_intermediate_size;
    if (shared_width == 0) return;
    const std::string shared =
        fmt::format("{}{}.", names.shared_expert_in_layer ? prefix : module, names.shared_expert);
    shared_ = moe_.gated
                  ? ReadGatedMlp(
                        source, shared,
                        {.intermediate_size = shared_width, .limit = spec.mlp_limit, .limits_gate = moe_.limits_gate})
                  : ReadUngatedMlp(source, shared, shared_width);
    if (!moe_.shared_expert_gate) return;
    shared_gate_ = source.reader.Linear({{.module = name_of(names.shared_expert_gate), .out = 1, .whole = true}},
                                        config_.hidden, false, kernels::WeightType::kF32);
  }

  void Place(Scratch& scratch, int64_t rows) noexcept override {
    logits_ = scratch.Take(rows * moe_.num_experts);
    latents_ = scratch.Take(rows * moe_.moe_latent_size);
    latents_out_ = scratch.Take(rows * moe_.moe_latent_size);
    if (!shared_) return;
    shared_out_ = scratch.Take(rows * config_.hidden);
    scratch.OverlapScratch(*shared_, rows);
  }

  void SetTokens(const int32_t* tokens) noexcept override { tokens_ = tokens; }

  void Forward(const float* x, int64_t rows, float* out) noexcept override {
    router_->Forward(x, rows, logits_, moe_.num_experts);
    if (experts_of_token_.bytes() != 0) {
      ops_.KeepExperts(logits_, rows, moe_.num_experts, tokens_, experts_of_token_.as<int32_t>(),
                       moe_.num_experts_per_tok);
    }
    if (const auto cap = static_cast<float>(config_.router_logit_softcapping); cap != 0) {
      ops_.Softcap(logits_, rows, moe_.num_experts, cap, nullptr);
    }
    if (to_latent_) {
      to_latent_->Forward(x, rows, latents_, moe_.moe_latent_size);
      experts_->Forward(latents_, logits_, rows, latents_out_);
      from_latent_->Forward(latents_out_, rows, out, config_.hidden);
    } else {
      experts_->Forward(x, logits_, rows, out);
    }
    if (!shared_) return;
    shared_->Forward(x, rows, shared_out_);
    if (config_.shared_expert_scale != 1) ops_.Scale(shared_out_, config_.shared_expert_scale, rows * config_.hidden);
    if (!shared_gate_) return ops_.Add(out, shared_out_, rows * config_.hidden);
    float* gate = logits_;  // [rows]
    shared_gate_->Forward(x, rows, gate, 1);
    ops_.AddGated(out, shared_out_, gate, rows, config_.hidden);
  }

 private:
  static kernels::MoeConfig ConfigOf(const BlockSource& source, const LayerSpec& spec) {
    kernels::MoeConfig moe = source.config.moe;
    moe.activation_limit = spec.expert_limit;
    if (spec.hash_moe) moe.has_correction_bias = false;
    return moe;
  }

  // The table of each token's experts, [vocab][num_experts_per_tok] of 32 or 64 bits.
  void ReadTable(const BlockSource& source, const std::string& name) {
    const int64_t vocab = config_.vocab, chosen = moe_.num_experts_per_tok;
    const weights::TensorView& table = source.reader.Tensor(name, std::array{vocab, chosen});
    const size_t bytes = table.dtype == "I64" ? sizeof(int64_t) : sizeof(int32_t);
    if (table.dtype != "I64" && table.dtype != "I32") {
      throw InputError(fmt::format("tensor {} is {}; expected I32 or I64", name, table.dtype));
    }
    std::vector<int32_t> experts;
    for (int64_t i = 0; i < vocab * chosen; ++i) {
      int64_t expert = 0;  // in the order of the bytes of x86 and aarch64
      std::memcpy(&expert, table.data.data() + static_cast<size_t>(i) * bytes, bytes);
      if (expert < 0 || expert >= moe_.num_experts) {
        throw InputError(
            fmt::format("tensor {}: expert {} of token {}; there are {}", name, expert, i / chosen, moe_.num_experts));
      }
      experts.push_back(static_cast<int32_t>(expert));
    }
    experts_of_token_ = Upload(source, experts);
    source.reader.AddBytes(static_cast<int64_t>(experts_of_token_.bytes()));
  }

  // e_score_correction_bias of the experts; none if the architecture has no such bias.
  static std::vector<float> ReadCorrection(const BlockSource& source, const std::string& name) {
    const int64_t experts = source.config.moe.num_experts;
    if (!source.config.moe.has_correction_bias) return {};
    if (source.config.names.correction_bias_is_optional && !source.reader.Has(name)) return {};
    if (!source.config.names.correction_bias_is_row) return source.reader.KeptValues(name, experts);
    const weights::WeightView row =
        source.reader.Elements(name, std::array{int64_t{1}, experts}, kernels::WeightType::kF32);
    source.reader.AddBytes(experts * static_cast<int64_t>(sizeof(float)));
    std::vector<float> values;
    for (int64_t i = 0; i < experts; ++i) values.push_back(ElementValue(row, i));
    return values;
  }

  kernels::Ops& ops_;
  const ModelConfig& config_;
  const kernels::MoeConfig moe_;
  std::unique_ptr<kernels::Linear> router_;  // hidden -> num_experts
  std::unique_ptr<kernels::ExpertLayer> experts_;
  std::unique_ptr<kernels::Linear> to_latent_, from_latent_;  // hidden -> latent, and back; null: none
  std::unique_ptr<MlpBlock> shared_;                          // null: no shared experts
  std::unique_ptr<kernels::Linear> shared_gate_;              // hidden -> 1; null: shared experts are added as they are
  Buffer experts_of_token_;          // int32 [vocab][num_experts_per_tok]; none: the router chooses
  const int32_t* tokens_ = nullptr;  // [rows]
  // Scratch, f32 [rows][...]:
  float* logits_ = nullptr;   // num_experts
  float* latents_ = nullptr;  // moe_latent_size: inputs of the experts
  float* latents_out_ = nullptr;
  float* shared_out_ = nullptr;  // hidden
};

}  // namespace

std::unique_ptr<MlpBlock> ReadMoe(const BlockSource& source, const LayerSpec& spec, const std::string& prefix,
                                  const std::string& module) {
  return std::make_unique<MixtureOfExperts>(source, spec, prefix, module);
}

}  // namespace kvanta::models
