// Configs of architectures with experts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kvanta/error.h"
#include "models/config/config.h"
#include "models/config_json.h"
#include "models/weight_count.h"

namespace kvanta::models {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// Keys that all have, for 4 layers.
json MoeBase(const char* architecture, const char* model_type) {
  json config = json::parse(R"({"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16", "num_experts_per_tok": 3})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  return config;
}

json Qwen3MoeJson() {
  json config = MoeBase("Qwen3MoeForCausalLM", "qwen3_moe");
  config.update(json::parse(R"({"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": true})"));
  return config;
}

json GptOssJson() {
  json config = MoeBase("GptOssForCausalLM", "gpt_oss");
  config.update(json::parse(R"({"num_local_experts": 8, "sliding_window": 32, "rope_theta": 150000, "rope_scaling":
    {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "truncate": false}})"));
  return config;
}

std::vector<bool> LayersOfExperts(const ModelConfig& config) {
  std::vector<bool> layers;
  for (const LayerSpec& layer : config.layer_specs) layers.push_back(layer.moe);
  return layers;
}

std::string MoeError(json config, const std::string& key, const json& value) {
  config[key] = value;
  try {
    Parse(config);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(MoeConfig, Qwen3Moe) {
  json config = Qwen3MoeJson();
  const ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(parsed.moe,
            (kernels::MoeConfig{
                .num_experts = 8, .num_experts_per_tok = 3, .moe_intermediate_size = 24, .norm_topk_prob = true}));
  EXPECT_THAT(LayersOfExperts(parsed), ElementsAre(true, true, true, true));
  config["decoder_sparse_step"] = 2;
  EXPECT_THAT(LayersOfExperts(Parse(config)), ElementsAre(false, true, false, true));
  config["mlp_only_layers"] = json::array({1});
  EXPECT_THAT(LayersOfExperts(Parse(config)), ElementsAre(false, false, false, true));
  config["use_sliding_window"] = true;
  config["sliding_window"] = 128;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(128, 128, 128, 128));
}

TEST(MoeConfig, Qwen2Moe) {
  json config = MoeBase("Qwen2MoeForCausalLM", "qwen2_moe");
  config.update(json::parse(R"({"num_experts": 60, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40, "sliding_window": 64, "use_sliding_window": false})"));
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.qkv_bias);
  EXPECT_FALSE(parsed.o_bias || parsed.qk_norm != QkNorm::kNone || parsed.moe.norm_topk_prob);
  EXPECT_EQ(parsed.moe.shared_expert_intermediate_size, 40);
  EXPECT_TRUE(parsed.moe.shared_expert_gate);
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(0, 0, 0, 0));
  config["use_sliding_window"] = true;
  config["max_window_layers"] = 3;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(64, 0, 64, 0));
}

TEST(MoeConfig, Mixtral) {
  json config = MoeBase("MixtralForCausalLM", "mixtral");
  const ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.moe.num_experts, 8) << "the class's default";
  EXPECT_EQ(parsed.moe.moe_intermediate_size, 96);
  EXPECT_TRUE(parsed.moe.norm_topk_prob);
  EXPECT_EQ(parsed.names.mlp, "block_sparse_moe");
  EXPECT_EQ(parsed.layer_specs[0].rope.theta, 1e6) << "the class's default";
  EXPECT_THAT(LayersOfExperts(parsed), ElementsAre(true, true, true, true));
}

TEST(MoeConfig, GptOss) {
  json config = GptOssJson();
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.layer_specs[1].attention_sinks && parsed.qkv_bias && parsed.o_bias && parsed.moe.bias);
  EXPECT_EQ(parsed.head_dim, 64) << "the class's default";
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(32, 0, 32, 0));
  EXPECT_EQ(parsed.moe.activation, kernels::Activation::kSwigluOai);
  EXPECT_EQ(parsed.layer_specs[0].rope.type, RopeType::kYarn);
  EXPECT_FALSE(parsed.layer_specs[0].rope.truncate);
  EXPECT_EQ(parsed.max_position, 512);
  EXPECT_THAT(MoeError(config, "swiglu_limit", 6.5), HasSubstr("expected 7"));
  config["quantization_config"] = {{"quant_method", "mxfp4"}};
  EXPECT_EQ(Parse(config).declared_kv_cache, "");
  EXPECT_TRUE(Parse(config).mxfp4_experts);
  const WeightCount plain = CountWeights(parsed), mxfp4 = CountWeights(Parse(config));
  const int64_t weights = int64_t{4} * 8 * 3 * 64 * 96;
  EXPECT_EQ(plain.Bytes(kernels::WeightType::kBf16) - mxfp4.Bytes(kernels::WeightType::kBf16, true),
            weights * 2 - weights / 32 * 17);
  EXPECT_EQ(plain.Bytes(kernels::WeightType::kBf16), mxfp4.Bytes(kernels::WeightType::kBf16)) << "--weight-dtype bf16";
  EXPECT_EQ(plain.Bytes(kernels::WeightType::kF32), mxfp4.Bytes(kernels::WeightType::kF32));
  // Per layer: attention, experts and router, the last with biases.
  const int64_t attention = 64 * (4 + 2 * 2) * 64 + 4 * 64 * 64, expert = 3 * 64 * 96;
  EXPECT_EQ(CountWeights(parsed).matrices, 4 * (attention + 8 * expert));
  const int64_t vectors = (4 + 2 * 2) * 64 + 64 + 4 + 8 * (2 * 96 + 64) + 8 * (64 + 1) + 2 * 64;
  EXPECT_EQ(CountWeights(parsed).vectors, 4 * vectors + 64);
}

TEST(MoeConfig, KimiK2IsDeepseekV3) {
  json config = MoeBase("DeepseekV3ForCausalLM", "kimi_k2");
  config.update(json::parse(R"({"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "first_k_dense_replace": 1,
    "n_routed_experts": 16, "n_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
    "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "norm_topk_prob": true, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn",
    "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0}})"));
  const ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.model_type, "kimi_k2");
  EXPECT_TRUE(parsed.moe.has_correction_bias);
  EXPECT_EQ(parsed.moe.n_group, 1);
  EXPECT_THAT(MoeError(config, "model_type", "kimi"), HasSubstr("'deepseek_v3' or 'kimi_k2'"));
}

TEST(MoeConfig, Glm4Moe) {
  json config = MoeBase("Glm4MoeForCausalLM", "glm4_moe");
  config.update(json::parse(R"({"n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 3, "use_qk_norm": true, "attention_bias": true, "num_nextn_predict_layers": 1})"));
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.qk_norm == QkNorm::kPerHead && parsed.qkv_bias && parsed.moe.has_correction_bias &&
              parsed.moe.norm_topk_prob);
  EXPECT_FALSE(parsed.o_bias);
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 8) << "half of a head by default";
  EXPECT_EQ(parsed.moe.shared_expert_intermediate_size, 48);
  EXPECT_EQ(parsed.num_nextn_predict_layers, 1);
  EXPECT_THAT(LayersOfExperts(parsed), ElementsAre(false, false, false, true));
  EXPECT_THAT(MoeError(config, "n_group", 8), HasSubstr("groups of at least 2 experts"));
}

TEST(MoeConfig, Glm4vMoe) {
  json text = MoeBase("", "glm4v_moe_text");
  text.update(json::parse(R"({"n_routed_experts": 8, "moe_intermediate_size": 24,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}})"));
  const json config = {
      {"architectures", {"Glm4vMoeForConditionalGeneration"}}, {"model_type", "glm4v_moe"}, {"text_config", text}};
  const ModelConfig parsed = Parse(config);
  EXPECT_TRUE(parsed.qkv_bias) << "the class's default";
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 8);
  EXPECT_EQ(parsed.names.decoders.front().prefix, "model.language_model.");
  text["use_qk_norm"] = true;
  EXPECT_THAT(MoeError(config, "text_config", text), HasSubstr("use_qk_norm' is true; expected false"));
}

// Keys that change what the models compute, in values that the engine has no code for.
TEST(MoeConfig, RefusedKeys) {
  struct Case {
    const char *architecture, *model_type, *key;
    json value;
    const char* expected;
  };
  const std::vector<Case> cases = {
      {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "first_k_dense_replace", 2, "1, or mlp_layer_types"},
      {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "mlp_layer_types", {"dense"}, "for each of 4 layers"},
      {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "scoring_func", "softmax", "expected sigmoid"},
      {"Glm4MoeLiteForCausalLM", "glm4_moe_lite", "topk_method", "greedy", "expected noaux_tc"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "attn_type_list", {1, 0, 1, 1}, "attention with a softmax"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "use_qk_norm", false, "expected true"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "qk_norm_type", "per_head", "expected per_layer"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "use_routing_bias", false, "expected true"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "scoring_func", "softmax", "expected sigmoid"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "shared_intermediate_size", 8, "expected 0"},
      {"MiniMaxM2ForCausalLM", "minimax_m2", "rotary_dim", 63, "an even number"},
      {"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "use_bias", true, "expected false"},
      {"Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "moe_norm_min", 0.1, "at most 1e-12"},
      {"OlmoeForCausalLM", "olmoe", "clip_qkv", 8, "q, k and v are not clipped"},
      {"Dots1ForCausalLM", "dots1", "moe_layer_freq", 2, "from 1 to 1"},
      {"SolarOpenForCausalLM", "solar_open", "use_qk_norm", true, "expected false"},
      {"SolarOpenForCausalLM", "solar_open", "first_k_dense_replace", 1, "all layers have experts"},
      {"SolarOpenForCausalLM", "solar_open", "partial_rotary_factor", 0.5, "rotated whole"},
      {"ExaoneMoeForCausalLM", "exaone_moe", "sliding_window_pattern", "LLLG", "sliding_window_pattern"},
      {"ExaoneMoeForCausalLM", "exaone_moe", "is_moe_layer", {true, true, true, true}, "first_k_dense_replace"},
  };
  for (const Case& each : cases) {
    json config = MoeBase(each.architecture, each.model_type);
    config.update(json::parse(R"({"n_routed_experts": 8, "eos_token_id": 2})"));
    EXPECT_NO_THROW(Parse(config)) << each.architecture;
    EXPECT_THAT(MoeError(config, each.key, each.value), AllOf(HasSubstr(each.key), HasSubstr(each.expected)));
  }
}

// Keys of published files, for 4 layers of less width: those that transformers does not read are no reason to refuse.
TEST(MoeConfig, PublishedFiles) {
  const auto parsed = [](const char* architecture, const char* model_type, const char* keys) {
    json config = MoeBase(architecture, model_type);
    config.erase("num_experts_per_tok");
    config.update(json::parse(keys));
    return Parse(config);
  };
  const ModelConfig flash = parsed("Glm4MoeLiteForCausalLM", "glm4_moe_lite", R"({"attention_bias": false,
    "topk_method": "noaux_tc", "norm_topk_prob": true, "n_group": 1, "topk_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0, "rope_scaling": null,
    "rope_theta": 1000000, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "v_head_dim": 256, "moe_intermediate_size": 1536})");
  EXPECT_EQ(flash.head_dim, 512) << "a latent";
  EXPECT_THAT(LayersOfExperts(flash), ElementsAre(false, true, true, true));
  const ModelConfig minimax = parsed("MiniMaxM2ForCausalLM", "minimax_m2", R"({"attn_type_list": [1, 1, 1, 1],
    "head_dim": 128, "mtp_transformer_layers": 1, "num_experts_per_tok": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config": {"activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}, "rope_theta": 5000000, "rotary_dim": 64,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_mtp": true, "use_qk_norm": true,
    "use_routing_bias": true})");
  EXPECT_EQ(minimax.layer_specs[0].rope.theta, 5e6);
  EXPECT_TRUE(minimax.quantization.IsIgnored("model.layers.0.block_sparse_moe.gate"));
  EXPECT_FALSE(minimax.quantization.IsIgnored("model.layers.0.block_sparse_moe.experts.0.w1"));
  const ModelConfig ernie = parsed("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", R"({"use_bias": false,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    "moe_intermediate_size": 1536, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_k": 6,
    "moe_layer_interval": 1, "moe_use_aux_free": true, "num_nextn_predict_layers": 1, "rope_theta": 500000})");
  EXPECT_THAT(LayersOfExperts(ernie), ElementsAre(false, true, true, true));
  EXPECT_TRUE(ernie.tied_embeddings) << "the class's default";
  const ModelConfig exaone = parsed("ExaoneMoEForCausalLM", "exaone_moe", R"({"first_last_k_dense_replace": 1,
    "is_moe_layer": [false, true, true, true], "layer_types": ["sliding_attention", "sliding_attention",
    "sliding_attention", "full_attention"], "moe_intermediate_size": 2048, "num_experts": 128,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "rope_scaling": null, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "sliding_window": 128, "sliding_window_pattern": "LLLG", "eos_token_id": 53})");
  EXPECT_THAT(exaone.SlidingWindows(), ElementsAre(128, 128, 128, 0));
  EXPECT_EQ(exaone.layer_specs[3].rope.rotary_dim, 0);
  EXPECT_EQ(exaone.architecture, "ExaoneMoeForCausalLM");
  const ModelConfig dots = parsed("Dots1ForCausalLM", "dots1", R"({"n_routed_experts": 128, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": null,
    "max_window_layers": 62, "n_group": 1, "topk_group": 1})");
  EXPECT_THAT(dots.SlidingWindows(), ElementsAre(0, 0, 0, 0));
  EXPECT_TRUE(dots.qk_norm == QkNorm::kPerHead && dots.moe.has_correction_bias);
}

TEST(MoeConfig, RotaryDimOfMinimaxM2) {
  json config = MoeBase("MiniMaxM2ForCausalLM", "minimax_m2");
  EXPECT_EQ(Parse(config).layer_specs[0].rope.rotary_dim, 128) << "whole heads of the class's size";
  config["rotary_dim"] = 64;
  EXPECT_EQ(Parse(config).layer_specs[3].rope.rotary_dim, 64);
  EXPECT_THAT(MoeError(config, "partial_rotary_factor", 0.25), HasSubstr("32, as partial_rotary_factor says"));
}

// As published: empty or absent lists have the class's meaning.
TEST(MoeConfig, Llama4) {
  json text = MoeBase("", "llama4_text");
  text.update(json::parse(R"({"num_experts_per_tok": 1, "num_local_experts": 16, "intermediate_size_mlp": 128,
    "attention_chunk_size": 32, "no_rope_layers": [], "interleave_moe_layer_step": 2, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64}})"));
  const json config = {
      {"architectures", {"Llama4ForConditionalGeneration"}}, {"model_type", "llama4"}, {"text_config", text}};
  const ModelConfig parsed = Parse(config);
  EXPECT_THAT(LayersOfExperts(parsed), ElementsAre(false, true, false, true));
  for (int layer = 0; layer < 4; ++layer) {
    const LayerSpec& spec = parsed.layer_specs[layer];
    const bool rope = layer != 3;
    EXPECT_EQ(spec.rope.rotary_dim, rope ? 128 : 0) << layer;
    EXPECT_EQ(spec.rope.interleaved, rope) << layer;
    EXPECT_EQ(spec.qk_l2_norm, rope) << layer;
    const auto chunked = cache::Visibility{cache::VisibilityKind::kChunked, 32};
    EXPECT_EQ(spec.visibility, rope ? chunked : cache::Visibility{}) << layer;
  }
  EXPECT_EQ(parsed.attn_temperature.floor_scale, 8192) << "the class's default";
  EXPECT_EQ(parsed.intermediate_size, 128);
  EXPECT_EQ(parsed.moe, (kernels::MoeConfig{.num_experts = 16,
                                            .num_experts_per_tok = 1,
                                            .moe_intermediate_size = 96,
                                            .shared_expert_intermediate_size = 96,
                                            .scoring_func = kernels::ScoringFunc::kSigmoid,
                                            .apply_router_weight_on_input = true}));
  EXPECT_EQ(parsed.names.decoders.front().prefix, "language_model.model.");

  for (const auto& [tuning, expected] : std::vector<std::pair<json, int64_t>>{{4, 8192}, {0, 0}, {false, 0}}) {
    json changed = config;
    changed["text_config"]["attn_temperature_tuning"] = tuning;
    EXPECT_EQ(Parse(changed).attn_temperature.floor_scale, expected) << tuning;
  }
  text["architectures"] = {"Llama4ForCausalLM"};
  EXPECT_EQ(Parse(text).names.decoders.front().prefix, "model.");
  EXPECT_THAT(MoeError(text, "no_rope_layers", json::array({1, 0})), HasSubstr("for each of 4 layers"));
  EXPECT_THAT(MoeError(text, "moe_layers", json::array({4})), HasSubstr("a list of layers from 0 to 3"));
  EXPECT_THAT(MoeError(text, "layer_types", json::array({"sliding_attention"})), HasSubstr("'chunked_attention' or"));
}

TEST(MoeConfig, Errors) {
  const json config = Qwen3MoeJson();
  EXPECT_THAT(MoeError(config, "num_experts_per_tok", 9), HasSubstr("from 1 to 8"));
  EXPECT_THAT(MoeError(config, "num_experts", 0), HasSubstr("from 1 to 4096"));
  EXPECT_THAT(MoeError(config, "mlp_only_layers", json::array({4})), HasSubstr("a list of layers from 0 to 3"));
  EXPECT_THAT(MoeError(config, "mlp_only_layers", 1), HasSubstr("a list of layers from 0 to 3"));
  EXPECT_THAT(MoeError(config, "decoder_sparse_step", 0), HasSubstr("decoder_sparse_step"));
}

}  // namespace
}  // namespace kvanta::models
