// DeepSeek V2 and V3 (and what takes their names: Kimi K2, Moonlight): attention over latents, layers of experts.
// transformers: models/deepseek_v2/modeling_deepseek_v2.py, models/deepseek_v3/modeling_deepseek_v3.py.
#include <fmt/format.h>

#include <algorithm>

#include "formats/scheme.h"
#include "models/architecture.h"
#include "models/decoder.h"

namespace kvanta::models {
namespace {

constexpr int64_t kMaxDim = 1024;  // of a head's parts
constexpr int64_t kMaxInner = int64_t{1} << 20;
constexpr int kMaxExperts = 4096;

void ReadLatents(const JsonObject& json, ModelConfig& config) {
  MlaConfig& latent = config.latent;
  latent.rank = static_cast<int>(json.Int("kv_lora_rank", 8, formats::kMaxLatentRank));
  if (latent.rank % 8 != 0) json.Fail("kv_lora_rank", "a multiple of 8");
  latent.q_lora_rank = static_cast<int>(json.Int("q_lora_rank", 1, kMaxInner, 0));
  latent.qk_nope_head_dim = static_cast<int>(json.Int("qk_nope_head_dim", 1, kMaxDim));
  latent.rope_dim = static_cast<int>(json.Int("qk_rope_head_dim", 2, formats::kMaxRopeDim));
  if (latent.rope_dim % 2 != 0) json.Fail("qk_rope_head_dim", "an even number");
  latent.v_head_dim = static_cast<int>(json.Int("v_head_dim", 1, kMaxDim));
  config.kv_heads = 1;
  config.head_dim = latent.rank;
  config.rotary_dim = latent.rope_dim;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
}

// The keys of the groups; without them, one group.
void ReadGroups(const JsonObject& json, MoeConfig& experts) {
  experts.groups = static_cast<int>(json.Int("n_group", 1, experts.count, 1));
  experts.topk_group = static_cast<int>(json.Int("topk_group", 1, experts.groups, experts.groups));
  if (experts.count % experts.groups != 0) {
    json.Fail("n_group", fmt::format("a divisor of n_routed_experts ({})", experts.count));
  }
  if (experts.chosen > experts.count / experts.groups * experts.topk_group) {
    json.Fail("topk_group", fmt::format("groups with at least num_experts_per_tok ({}) experts", experts.chosen));
  }
}

void ReadExperts(const JsonObject& json, ModelConfig& config) {
  MoeConfig& experts = config.experts;
  const auto first = static_cast<int>(json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 0));
  if (first >= config.layers || !json.Has("n_routed_experts")) return;
  experts.first_layer = first;
  experts.count = static_cast<int>(json.Int("n_routed_experts", 1, kMaxExperts));
  experts.chosen = static_cast<int>(json.Int("num_experts_per_tok", 1, experts.count));
  experts.shared = static_cast<int>(json.Int("n_shared_experts", 0, kMaxExperts, 0));
  experts.intermediate_size = static_cast<int>(json.Int("moe_intermediate_size", 1, kMaxInner));
  experts.scale = json.Number("routed_scaling_factor", 0, 1e6, 1.0);
  if (json.Int("moe_layer_freq", 1, 1, 1) != 1) json.Fail("moe_layer_freq", "1");
}

void ReadDeepseekV2(const JsonObject& json, ModelConfig& config) {
  ReadLatents(json, config);
  config.mlp_bias = json.Bool("mlp_bias", false);
  ReadExperts(json, config);
  if (config.experts.count == 0) return;
  if (json.String("scoring_func", "softmax") != "softmax") json.Fail("scoring_func", "softmax");
  // DeepSeek's own code and transformers differ in what it does; every published model has false.
  if (json.Bool("norm_topk_prob", false)) json.Fail("norm_topk_prob", "false");
  const std::string method = json.String("topk_method", "greedy");
  if (method != "greedy" && method != "group_limited_greedy") {
    json.Fail("topk_method", "greedy or group_limited_greedy");
  }
  if (method == "group_limited_greedy") ReadGroups(json, config.experts);
}

void ReadDeepseekV3(const JsonObject& json, ModelConfig& config) {
  ReadLatents(json, config);
  config.latent.interleaved = json.Bool("rope_interleave", true);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  ReadExperts(json, config);
  if (config.experts.count == 0) return;
  if (json.String("scoring_func", "sigmoid") != "sigmoid") json.Fail("scoring_func", "sigmoid");
  if (json.String("topk_method", "noaux_tc") != "noaux_tc") json.Fail("topk_method", "noaux_tc");
  ReadGroups(json, config.experts);
  if (config.experts.count / config.experts.groups < 2) json.Fail("n_group", "groups of at least 2 experts");
  config.experts.sigmoid = true;
  config.experts.normalized = json.Bool("norm_topk_prob", true);
}

}  // namespace

// Heads have no size of their own; 64 only keeps hidden_size / num_attention_heads from being asked for.
const Architecture kDeepseekV2 = {"DeepseekV2ForCausalLM", "deepseek_v2", 64, ReadDeepseekV2, LoadDecoder};
const Architecture kDeepseekV3 = {"DeepseekV3ForCausalLM", "deepseek_v3", 64, ReadDeepseekV3, LoadDecoder};

}  // namespace kvanta::models
