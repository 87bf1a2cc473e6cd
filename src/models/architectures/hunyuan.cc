// Hunyuan: Llama with norms of each head's q and k after RoPE, and a base of its frequencies that `alpha` stretches.
// With experts: in all layers, next to a shared MLP. transformers:
// models/hunyuan_v1_dense/modeling_hunyuan_v1_dense.py, models/hunyuan_v1_moe/modeling_hunyuan_v1_moe.py.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// NTK-aware scaling with a fixed factor: the same for all lengths, though checkpoints call it "dynamic".
void StretchBase(const JsonObject& json, ModelConfig& config) {
  const bool has_scaling = json.Has("rope_scaling") && !json.Object("rope_scaling").Value().empty();
  const std::string_view key = has_scaling ? "rope_scaling" : "rope_parameters";
  if (!json.Has(key)) return;
  const JsonObject rope = json.Object(key);
  if (rope.String(rope.Has("rope_type") ? "rope_type" : "type", "default") != "dynamic") return;
  const double alpha = rope.Number("alpha", 0, 1e9, 0);
  if (alpha == 0) return;
  if (config.head_dim <= 2) json.Fail("head_dim", "more than 2, to be rotated with an alpha");
  const double dim = config.head_dim;
  for (LayerSpec& layer : config.layer_specs) layer.rope.theta *= std::pow(alpha, dim / (dim - 2));
}

void ReadHunYuanDense(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHeadAfterRope;
  config.names.q_norm = "query_layernorm";
  config.names.k_norm = "key_layernorm";
  StretchBase(json, config);
}

// A number, or a list of the same one for each layer.
int ReadOfAllLayers(const JsonObject& json, std::string_view key, int64_t min, int64_t max, int64_t missing) {
  const Json* values = json.Find(key);
  if (values == nullptr || !values->is_array()) return static_cast<int>(json.Int(key, min, max, missing));
  const auto is_first = [&](const Json& value) { return value == values->front(); };
  if (values->empty() || !std::ranges::all_of(*values, is_first)) {
    json.Fail(key, "a number, or a list of the same number for each layer");
  }
  const Json first = {{key, values->front()}};
  return static_cast<int>(JsonObject(first, json.File()).Int(key, min, max));
}

void ReadHunYuanMoe(const JsonObject& json, ModelConfig& config) {
  ReadHunYuanDense(json, config);
  MarkSparseLayers(0, config);
  kernels::MoeConfig& moe = config.moe;
  moe.num_experts = ReadOfAllLayers(json, "num_experts", 1, kMaxExperts, 1);
  const char* used = json.Has("moe_topk") ? "moe_topk" : "num_experts_per_tok";
  moe.num_experts_per_tok = ReadOfAllLayers(json, used, 1, moe.num_experts, 1);
  // transformers takes the MLPs' width for the experts', and one shared MLP, whatever the published keys say.
  moe.moe_intermediate_size = moe.shared_expert_intermediate_size = config.intermediate_size;
  constexpr const char* kWidth = "moe_intermediate_size";
  constexpr const char* kShared = "num_shared_expert";
  if (ReadOfAllLayers(json, kWidth, 1, kMaxExpertWidth, config.intermediate_size) != config.intermediate_size) {
    json.Fail(kWidth, fmt::format("intermediate_size ({})", config.intermediate_size));
  }
  if (ReadOfAllLayers(json, kShared, 0, kMaxExperts, 1) != 1) json.Fail(kShared, "1");
  // Keys of the published file that transformers does not read: what its class computes.
  if (json.Bool("use_cla", false)) json.Fail("use_cla", "false");  // K and V that layers share
  if (!json.Bool("use_qk_norm", true)) json.Fail("use_qk_norm", "true");
  if (json.Int("moe_layer_num_skipped", 0, kMaxExperts, 0) != 0) json.Fail("moe_layer_num_skipped", "0");
  moe.norm_topk_prob = true;
  config.names.router = "gate.wg";
  config.names.shared_expert = "shared_mlp";
}

constexpr std::string_view kHunYuanDefaults = R"({"vocab_size": 290943, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
  "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kHunYuanDense = {"HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", ReadHunYuanDense,
                                           kHunYuanDefaults};
extern const Architecture kHunYuanMoe = {"HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", ReadHunYuanMoe, kHunYuanDefaults};

}  // namespace kvanta::models
