// Configs of architectures whose layers differ in heads, ropes and activations: as published, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models::further_layers_test {
namespace {

using nlohmann::json;
using testing::ElementsAre;

// For 4 layers of less width.
json Published(const char* architecture, const char* model_type, const char* keys) {
  json config = json::parse(R"({"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512, "torch_dtype": "bfloat16"})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  config.update(json::parse(keys));
  return config;
}

json Step35() {
  return Published("Step3p5ForCausalLM", "step3p5", R"({"num_attention_groups": 2, "head_dim": 128,
    "att_impl_type": "GQA", "attention_other_setting": {"attention_type": "sliding_attention",
    "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 128, "true_head_dim": 128},
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    "sliding_attention"], "moe_layers_enum": "2,3", "moe_num_experts": 16, "moe_top_k": 4, "moe_intermediate_size": 64,
    "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "need_fp32_gate": true,
    "norm_expert_weight": true, "num_nextn_predict_layers": 2, "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
    "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 256,
    "low_freq_factor": 1.0, "high_freq_factor": 32.0}, "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0, 5000000.0,
    10000.0], "share_expert_dim": 80, "sink": false, "sliding_window": 128, "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0,
    0.0], "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 0.0, 0.0], "use_head_wise_attn_gate": true, "use_moe": true,
    "use_moe_router_bias": true, "use_qk_norm": true, "use_rope_layers": [], "yarn_only_types": ["full_attention"],
    "zero_centered": true})");
}

json Laguna() {
  return Published("LagunaForCausalLM", "laguna", R"({"num_key_value_heads": 2, "head_dim": 64,
    "num_attention_heads_per_layer": [4, 8, 8, 8], "layer_types": ["full_attention", "sliding_attention",
    "sliding_attention", "sliding_attention"], "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 80})");
}

json GraniteSwa() {
  return Published("GraniteSWAForCausalLM", "granite_swa",
                   R"({"num_key_value_heads": 2, "layer_rope_theta": [0, 10000, 10000, 500000]})");
}

TEST(FurtherLayers, Step35) {
  const ModelConfig parsed = Parse(Step35());
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(0, 128, 128, 128));
  EXPECT_EQ(parsed.layer_specs[0].heads, 4);
  EXPECT_EQ(parsed.layer_specs[3].heads, 6);
  EXPECT_EQ(parsed.kv_heads, 2);
  EXPECT_EQ(parsed.layer_specs[0].rope.type, RopeType::kLlama3);
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 64);
  EXPECT_EQ(parsed.layer_specs[0].rope.theta, 5e6);
  EXPECT_EQ(parsed.layer_specs[1].rope.type, RopeType::kDefault);
  EXPECT_EQ(parsed.layer_specs[1].rope.rotary_dim, 128);
  EXPECT_FALSE(parsed.layer_specs[1].moe);
  EXPECT_TRUE(parsed.layer_specs[2].moe);
  EXPECT_EQ(parsed.layer_specs[2].expert_limit, 0);
  EXPECT_EQ(parsed.layer_specs[3].expert_limit, 7);
  EXPECT_EQ(parsed.layer_specs[3].mlp_limit, 16);
  EXPECT_EQ(parsed.moe.shared_expert_intermediate_size, 80);
  EXPECT_EQ(parsed.moe.routed_scaling_factor, 3);
  EXPECT_EQ(parsed.num_nextn_predict_layers, 2);
}

TEST(FurtherLayers, Laguna) {
  const ModelConfig parsed = Parse(Laguna());
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(0, 512, 512, 512));
  EXPECT_EQ(parsed.layer_specs[0].heads, 4);
  EXPECT_EQ(parsed.layer_specs[1].heads, 8);
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 32) << "the class's default";
  EXPECT_EQ(parsed.layer_specs[1].rope.rotary_dim, 64);
  EXPECT_EQ(parsed.attn_gate_function, kernels::GateFunction::kSoftplus);
}

TEST(FurtherLayers, GraniteSwa) {
  const ModelConfig parsed = Parse(GraniteSwa());
  EXPECT_THAT(parsed.SlidingWindows(), ElementsAre(0, 128, 128, 128));
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 0);
  EXPECT_EQ(parsed.layer_specs[3].rope.theta, 5e5);
  EXPECT_TRUE(parsed.layer_specs[0].attention_sinks);
}

TEST(FurtherLayers, RefusedKeys) {
  struct Case {
    json config;
    const char* key;
    json value;
    const char* message;
  };
  const json other = {{"num_attention_heads", 6}, {"num_attention_groups", 4}};
  const json mellum = Published("MellumForCausalLM", "mellum", R"({"num_key_value_heads": 2, "num_experts": 16})");
  const json hunyuan = Published("HYV3ForCausalLM", "hy_v3", R"({"num_key_value_heads": 2, "num_experts": 16})");
  const json olmo = Published("OlmoForCausalLM", "olmo", "{}");
  const json gptj = Published("GPTJForCausalLM", "gptj", R"({"rotary_dim": 32})");
  const json cohere = Published("Cohere2MoeForCausalLM", "cohere2_moe", R"({"num_key_value_heads": 2})");
  const std::vector<Case> cases = {
      {Step35(), "moe_router_activation", "softmax", "key 'moe_router_activation' is 'softmax'; expected sigmoid"},
      {Step35(), "use_head_wise_attn_gate", false, "key 'use_head_wise_attn_gate' is false; expected true"},
      {Step35(), "sink", true, "key 'sink' is true; expected false"},
      {Step35(), "attention_other_setting", other,
       "key 'attention_other_setting.num_attention_groups' is 4; expected 2"},
      {Step35(), "num_sliding_attention_heads", 5, "5 heads of layers with a window; expected a multiple of"},
      {Step35(), "yarn_only_types", {"sliding_attention"}, "expected ['full_attention']"},
      {Step35(), "swiglu_limits", {1, 2}, "one entry for each of 4 layers"},
      {Step35(), "swiglu_limits", {-1, 0, 0, 0}, "a number or null for each layer"},
      {Step35(), "moe_layers_enum", "2,x", "numbers of layers"},
      {Step35(), "use_rope_layers", {1, 1, 0, 1}, "key 'use_rope_layers' is a list of 4; expected an empty list"},
      {Laguna(), "num_attention_heads_per_layer", {4, 8, 8, 7}, "a multiple of num_key_value_heads (2)"},
      {Laguna(), "gating", false, "key 'gating' is false; expected true, per-head or per-element"},
      {Laguna(), "moe_apply_router_weight_on_input", true, "expected false"},
      {Laguna(), "rope_parameters", {{"full_attention", json::object()}}, "an object with 'sliding_attention'"},
      {GraniteSwa(), "layer_rope_theta", {0, 1, 2}, "for each of 4 layers"},
      {mellum, "rope_theta", 1e6, "key 'rope_theta' is 1000000.0; expected absent"},
      {hunyuan, "route_norm", false, "key 'route_norm' is false; expected true"},
      {hunyuan, "expert_hidden_dim", 64, "expected moe_intermediate_size"},
      {olmo, "clip_qkv", 8.0, "key 'clip_qkv' is 8.0; expected null"},
      {gptj, "rotary_dim", 65, "key 'rotary_dim' is 65"},
      {gptj, "tie_word_embeddings", true, "the output matrix has a bias"},
      {cohere, "expert_selection_fn", "tanh", "expected softmax or sigmoid"},
      {cohere, "shared_expert_combination_strategy", "max", "expected average or sum"},
  };
  for (const Case& each : cases) {
    EXPECT_NO_THROW(Parse(each.config)) << each.key;
    ExpectRefused(With(each.config, each.key, each.value), each.message);
  }
}

}  // namespace
}  // namespace kvanta::models::further_layers_test
