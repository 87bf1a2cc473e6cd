// DeepSeek V2 and V3 (also Kimi K2, Moonlight): multi-head latent attention, mixtures of experts. A.X K1: V3 with one
// more norm. Youtu-LLM: the same
// attention without experts. transformers: models/deepseek_v2/modeling_deepseek_v2.py,
// models/deepseek_v3/modeling_deepseek_v3.py, models/youtu/modeling_youtu.py.
#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

constexpr const char* kRoutedExperts = "n_routed_experts";

void ReadMoe(const JsonObject& json, ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  const auto first = static_cast<int>(json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 0));
  if (first >= config.layers || !json.Has(kRoutedExperts)) return;
  for (int layer = first; layer < config.layers; ++layer) config.layer_specs[layer].moe = true;
  ReadExpertCounts(json, kRoutedExperts, "moe_intermediate_size", config);
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("n_shared_experts", 0, kMaxExperts, 0)) * moe.moe_intermediate_size;
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.0));
  if (json.Int("moe_layer_freq", 1, 1, 1) != 1) json.Fail("moe_layer_freq", "1");
}

void ReadDeepseekV2(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mlp.bias = json.Bool("mlp_bias", false);
  ReadMoe(json, config);
  if (config.moe.num_experts == 0) return;
  if (json.String("scoring_func", "softmax") != "softmax") json.Fail("scoring_func", "softmax");
  // DeepSeek's own code and transformers differ in what it does; every published model has false.
  if (json.Bool("norm_topk_prob", false)) json.Fail("norm_topk_prob", "false");
  const std::string method = json.String("topk_method", "greedy");
  if (method != "greedy" && method != "group_limited_greedy") {
    json.Fail("topk_method", "greedy or group_limited_greedy");
  }
  if (method == "group_limited_greedy") ReadExpertGroups(json, kRoutedExperts, config);
}

void ReadDeepseekV3(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mla.rope_interleave = json.BoolOrNull("rope_interleave", true);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  if (config.num_nextn_predict_layers > 0) config.names.predictor = kNextnPredictor;
  ReadMoe(json, config);
  if (config.moe.num_experts == 0) return;
  if (json.String("scoring_func", "sigmoid") != "sigmoid") json.Fail("scoring_func", "sigmoid");
  if (json.String("topk_method", "noaux_tc") != "noaux_tc") json.Fail("topk_method", "noaux_tc");
  ReadExpertGroups(json, kRoutedExperts, config);
  if (config.moe.num_experts / config.moe.n_group < 2) json.Fail("n_group", "groups of at least 2 experts");
  config.moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  config.moe.has_correction_bias = true;
  config.moe.norm_topk_prob = json.BoolOrNull("norm_topk_prob", true);
}

// A.X K1: V3 with a norm after the experts, and no correction bias in published checkpoints.
void ReadAxK1(const JsonObject& json, ModelConfig& config) {
  if (!json.Has("q_lora_rank")) json.Fail("q_lora_rank", "a number");
  ReadDeepseekV3(json, config);
  if (json.Has("mlp_layer_types")) ReadMlpLayerTypes(json, 1, config);
  config.names.post_mlp_norm = "post_mlp_layernorm";
  config.names.post_mlp_norm_of_experts = true;
  config.names.correction_bias_is_optional = true;
}

void ReadYoutu(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mla.rope_interleave = json.BoolOrNull("rope_interleave", true);
}

}  // namespace

// Heads have no one size; this one only replaces hidden_size / num_attention_heads.
constexpr std::string_view kDeepseekV2Defaults = R"({"head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
  "moe_intermediate_size": 1407})";
constexpr std::string_view kDeepseekV3Defaults = R"({"head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
  "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
  "routed_scaling_factor": 2.5})";
constexpr std::string_view kDeepseekV3TextDefaults = R"({"vocab_size": 129280, "hidden_size": 7168,
  "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
  "max_position_embeddings": 4096, "eos_token_id": 1, "bos_token_id": 0})";
constexpr std::string_view kAxK1Defaults = R"({"vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
  "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "kv_lora_rank": 512,
  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 192,
  "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4,
  "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 32768, "eos_token_id": 163691,
  "bos_token_id": 163691})";
constexpr std::string_view kYoutuDefaults = R"({"vocab_size": 128256, "hidden_size": 2048,
  "intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16,
  "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "v_head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": true, "eos_token_id": 128001,
  "bos_token_id": 128000})";

extern const Architecture kDeepseekV2 = {"DeepseekV2ForCausalLM", "deepseek_v2", ReadDeepseekV2, kDeepseekV2Defaults};
extern const Architecture kDeepseekV3 = {.name = "DeepseekV3ForCausalLM",
                                         .model_type = "deepseek_v3",
                                         .read_config = ReadDeepseekV3,
                                         .defaults = kDeepseekV3Defaults,
                                         .other_model_type = "kimi_k2",
                                         .text_defaults = kDeepseekV3TextDefaults};
extern const Architecture kAxK1 = {"AXK1ForCausalLM", "axk1", ReadAxK1, kAxK1Defaults};
extern const Architecture kYoutu = {"YoutuForCausalLM", "youtu", ReadYoutu, kYoutuDefaults};

}  // namespace kvanta::models
