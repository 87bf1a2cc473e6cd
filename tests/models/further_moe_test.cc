// Configs of further architectures with experts: as published, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "error_of.h"
#include "kvanta/error.h"
#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models::further_moe_test {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// For 4 layers of less width.
json Published(const char* architecture, const char* model_type, const char* keys) {
  json config = json::parse(R"({"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16"})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  config.update(json::parse(keys));
  return config;
}

json Trinity() {
  return Published("AfmoeForCausalLM", "afmoe", R"({"global_attn_every_n_layers": 4, "head_dim": 128,
    "load_balance_coeff": 0.001, "moe_intermediate_size": 64, "mup_enabled": true, "n_group": 1, "num_dense_layers": 2,
    "num_expert_groups": 1, "num_experts": 128, "num_experts_per_tok": 8, "num_limited_groups": 1,
    "num_shared_experts": 1, "rope_scaling": null, "rope_theta": 10000, "route_norm": true, "route_scale": 2.826,
    "score_func": "sigmoid", "sliding_window": 128, "topk_group": 1, "use_grouped_mm": true})");
}

json HunYuanA13b() {
  return Published("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", R"({"attention_head_dim": 64, "cla_share_factor": 2,
    "moe_drop_tokens": false, "moe_intermediate_size": [96, 96, 96, 96], "moe_layer_num_skipped": 0,
    "moe_topk": [8, 8, 8, 8], "norm_type": "rms", "num_experts": 64, "num_shared_expert": [1, 1, 1, 1],
    "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "type": "dynamic"}, "use_cla": false, "use_mixed_mlp_moe": true, "use_qk_norm": true})");
}

json Phi35Moe() {
  json config = Published("PhiMoEForCausalLM", "phimoe", R"({"attention_bias": true, "hidden_act": "silu",
    "input_jitter_noise": 0.01, "lm_head_bias": true, "num_experts_per_tok": 2, "num_local_experts": 16,
    "original_max_position_embeddings": 64, "rms_norm_eps": 1e-05, "router_jitter_noise": 0.01, "rope_theta": 10000.0,
    "rope_scaling": {"long_mscale": 1.5, "original_max_position_embeddings": 64, "short_mscale": 1.25,
    "type": "longrope"}, "sliding_window": 131072})");
  config["rope_scaling"]["short_factor"] = config["rope_scaling"]["long_factor"] = std::vector<double>(32, 1.5);
  return config;
}

json MistralSmall4() {
  return Published("Mistral4ForCausalLM", "mistral4", R"({"kv_lora_rank": 64, "moe_intermediate_size": 64, "n_group": 1,
    "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 4, "q_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0, "topk_group": 1, "v_head_dim": 128,
    "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0, "type": "yarn"}})");
}

TEST(FurtherMoe, Trinity) {
  const ModelConfig parsed = Parse(Trinity());
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(128, 128, 128, 0));
  EXPECT_EQ(parsed.layer_specs[2].rope.rotary_dim, 128);
  EXPECT_EQ(parsed.layer_specs[3].rope.rotary_dim, 0);
  EXPECT_FALSE(parsed.layer_specs[1].moe);
  EXPECT_TRUE(parsed.layer_specs[2].moe);
  EXPECT_EQ(parsed.embedding_scale, 16);
  EXPECT_EQ(parsed.attn_output_gate, OutputGate::kOwnMatrix);
  EXPECT_EQ(parsed.moe.shared_expert_intermediate_size, 64);
  EXPECT_EQ(parsed.moe.routed_scaling_factor, 2.826F);
}

TEST(FurtherMoe, HunYuanA13b) {
  const ModelConfig parsed = Parse(HunYuanA13b());
  EXPECT_EQ(parsed.moe, (kernels::MoeConfig{.num_experts = 64,
                                            .num_experts_per_tok = 8,
                                            .moe_intermediate_size = 96,
                                            .shared_expert_intermediate_size = 96,
                                            .norm_topk_prob = true}));
  EXPECT_GT(parsed.layer_specs[0].rope.theta, 1e7);
}

TEST(FurtherMoe, Phi35Moe) {
  const ModelConfig parsed = Parse(Phi35Moe());
  EXPECT_EQ(parsed.architecture, "PhimoeForCausalLM");
  EXPECT_EQ(parsed.norm, NormKind::kLayerWithBias);
  EXPECT_TRUE(parsed.qkv_bias && parsed.o_bias && parsed.lm_head_bias);
  EXPECT_EQ(parsed.moe.scoring_func, kernels::ScoringFunc::kSparseMixer);
  EXPECT_EQ(parsed.layer_specs[0].rope.short_mscale, 1.25);
  EXPECT_EQ(parsed.layer_specs[0].rope.long_mscale, 1.5);
}

TEST(FurtherMoe, MistralSmall4) {
  const ModelConfig parsed = Parse(MistralSmall4());
  EXPECT_TRUE(parsed.UsesMla());
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 64);
  EXPECT_EQ(parsed.layer_specs[3].rope.llama_4_scaling_beta, 0.1);
  EXPECT_TRUE(parsed.layer_specs[0].moe && parsed.moe.norm_topk_prob);
  EXPECT_FALSE(parsed.moe.has_correction_bias);
  json inside = MistralSmall4();
  inside.erase("architectures");
  const json config = {
      {"architectures", {"Mistral3ForConditionalGeneration"}}, {"model_type", "mistral3"}, {"text_config", inside}};
  EXPECT_EQ(Parse(config).mla, parsed.mla) << "the language model of a file of text and images";
}

TEST(FurtherMoe, RefusedKeys) {
  struct Case {
    json config;
    const char* key;
    json value;
    const char* expected;
  };
  const std::vector<Case> cases = {
      {Trinity(), "attention_bias", true, "expected false"},
      {Trinity(), "n_group", 2, "expected 1"},
      {Trinity(), "num_limited_groups", 2, "expected 1"},
      {Trinity(), "route_norm", false, "expected true"},
      {Trinity(), "score_func", "softmax", "expected sigmoid"},
      {HunYuanA13b(), "moe_intermediate_size", {96, 96, 96, 48}, "the same number for each layer"},
      {HunYuanA13b(), "moe_intermediate_size", {48, 48, 48, 48}, "intermediate_size (96)"},
      {HunYuanA13b(), "moe_layer_num_skipped", 1, "expected 0"},
      {HunYuanA13b(), "moe_topk", json::array(), "a list of the same number"},
      {HunYuanA13b(), "moe_topk", {65, 65, 65, 65}, "from 1 to 64"},
      {HunYuanA13b(), "num_shared_expert", {2, 2, 2, 2}, "expected 1"},
      {HunYuanA13b(), "use_cla", true, "expected false"},
      {HunYuanA13b(), "use_qk_norm", false, "expected true"},
      {Phi35Moe(), "num_experts_per_tok", 3, "expected 2"},
      {Phi35Moe(), "rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "default or longrope"},
      {MistralSmall4(), "n_group", 2, "expected 1"},
  };
  for (const Case& each : cases) {
    EXPECT_NO_THROW(Parse(each.config)) << each.key;
    EXPECT_THAT(ErrorOf([&] { Parse(With(each.config, each.key, each.value)); }),
                AllOf(HasSubstr(each.key), HasSubstr(each.expected)));
  }
}

// Files of Qwen-Omni have the thinker's keys in an object, and in it the language model's.
TEST(FurtherMoe, ThinkerOfQwenOmni) {
  json text = Published("", "qwen3_omni_moe_text", R"({"num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "rope_scaling": {"mrope_section": [24, 20, 20], "type": "default"}})");
  text.erase("architectures");
  const json thinker = {{"model_type", "qwen3_omni_moe_thinker"}, {"text_config", text}};
  const json config = {{"architectures", {"Qwen3OmniMoeForConditionalGeneration"}},
                       {"model_type", "qwen3_omni_moe"},
                       {"thinker_config", thinker},
                       {"talker_config", json::object()}};
  const ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.architecture, "Qwen3OmniMoeThinkerForConditionalGeneration");
  EXPECT_EQ(parsed.names.decoders[0].prefix, "thinker.model.");
  EXPECT_TRUE(parsed.moe.norm_topk_prob) << "the class's default";
  EXPECT_THAT(ErrorOf([&] { Parse(With(config, "thinker_config", 3)); }), HasSubstr("thinker_config"));
}

}  // namespace
}  // namespace kvanta::models::further_moe_test
