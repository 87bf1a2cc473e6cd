// Keys that config.json leaves out, or has as null: what the Hugging Face class makes of them. The logits of such files
// are compared with transformers' in tests/python/test_config_defaults.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kvanta/error.h"
#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models::config_defaults_test {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

json Base(const char* architecture, const char* model_type) {
  json config = json::parse(R"({"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "dtype": "bfloat16",
    "max_position_embeddings": 512, "eos_token_id": 2})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  return config;
}

TEST(ConfigDefaults, SizesOfALanguageModelInAMultimodalFile) {
  const auto parse = [](const char* architecture, const char* model_type, const json& text) {
    const json config = {
        {"architectures", {architecture}}, {"model_type", model_type}, {"dtype", "bfloat16"}, {"text_config", text}};
    return Parse(config);
  };
  const ModelConfig mistral = parse("Mistral3ForConditionalGeneration", "mistral3", json::object());
  EXPECT_EQ(mistral.heads, 32);
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(mistral.intermediate_size, 14336);
  EXPECT_EQ(mistral.SlidingWindows(), std::vector<int>(32, 4096));
  const ModelConfig ministral = parse("Mistral3ForConditionalGeneration", "mistral3", {{"model_type", "ministral3"}});
  EXPECT_EQ(ministral.layers, 34);
  EXPECT_EQ(ministral.vocab, 131072);
  EXPECT_EQ(ministral.rms_eps, 1e-5);
  EXPECT_EQ(ministral.layer_specs[0].rope.llama_4_scaling_beta, 0.1);
  const ModelConfig gemma = parse("Gemma3ForConditionalGeneration", "gemma3", json::object());
  EXPECT_EQ(gemma.hidden, 2304);
  EXPECT_EQ(gemma.layers, 26);
  EXPECT_EQ(gemma.mlp.activation, kernels::Activation::kGeluTanh);
  EXPECT_EQ(parse("Llama4ForConditionalGeneration", "llama4", json::object()).heads, 40);
  EXPECT_EQ(parse("Qwen3_5ForConditionalGeneration", "qwen3_5", json::object()).hidden, 4096);
  EXPECT_EQ(parse("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", json::object()).moe.num_experts, 256);
}

TEST(ConfigDefaults, OfExperts) {
  json config = Base("MixtralForCausalLM", "mixtral");
  EXPECT_EQ(Parse(config).rms_eps, 1e-5);
  config = Base("GptOssForCausalLM", "gpt_oss");
  const ModelConfig gpt_oss = Parse(config);
  EXPECT_EQ(gpt_oss.rms_eps, 1e-5);
  const RopeSpec& rope = gpt_oss.layer_specs[0].rope;
  EXPECT_EQ(rope.type, RopeType::kYarn);
  EXPECT_EQ(rope.theta, 150000);
  EXPECT_EQ(rope.factor, 32);
  EXPECT_EQ(rope.original_max_position, 4096);
  EXPECT_FALSE(rope.truncate);
  config = Base("DeepseekV3ForCausalLM", "deepseek_v3");
  config["first_k_dense_replace"] = 1;
  const ModelConfig deepseek = Parse(config);
  EXPECT_EQ(deepseek.moe.routed_scaling_factor, 2.5F);
  EXPECT_EQ(deepseek.moe.n_group, 8);
  EXPECT_EQ(deepseek.moe.topk_group, 4);
  EXPECT_EQ(deepseek.mla.q_lora_rank, 1536);
  config["n_routed_experts"] = nullptr;
  EXPECT_FALSE(Parse(config).layer_specs[2].moe) << "null means no experts";
  config = Base("Qwen3MoeForCausalLM", "qwen3_moe");
  EXPECT_EQ(Parse(config).moe.num_experts, 128);
  config["num_local_experts"] = 16;  // the name that transformers 5 writes
  EXPECT_EQ(Parse(config).moe.num_experts, 16);
}

TEST(ConfigDefaults, NullIsFalseWhereTransformersTestsTheValue) {
  json config = Base("DeepseekV3ForCausalLM", "deepseek_v3");
  config["first_k_dense_replace"] = 1;
  EXPECT_TRUE(Parse(config).moe.norm_topk_prob && Parse(config).mla.rope_interleave);
  config["norm_topk_prob"] = config["rope_interleave"] = nullptr;
  EXPECT_FALSE(Parse(config).moe.norm_topk_prob || Parse(config).mla.rope_interleave);
  config = Base("LlamaForCausalLM", "llama");
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  EXPECT_TRUE(Parse(config).layer_specs[0].rope.truncate);
  config["rope_scaling"]["truncate"] = nullptr;
  EXPECT_FALSE(Parse(config).layer_specs[0].rope.truncate);
}

TEST(ConfigDefaults, AnActivationThatIsNullIsRefused) {
  for (const char* key : {"hidden_act", "hidden_activation"}) {
    const bool is_gemma = std::string_view(key) == "hidden_activation";
    json config = Base(is_gemma ? "Gemma2ForCausalLM" : "LlamaForCausalLM", is_gemma ? "gemma2" : "llama");
    config[key] = nullptr;
    try {
      Parse(config);
      ADD_FAILURE() << key;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr("is missing; expected silu or gelu_pytorch_tanh"));
    }
  }
}

TEST(ConfigDefaults, TheOriginalLengthAtTheTopComesFirst) {
  json config = Base("LlamaForCausalLM", "llama");
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
  EXPECT_EQ(Parse(config).layer_specs[0].rope.original_max_position, 64);
  config["original_max_position_embeddings"] = 32;
  EXPECT_EQ(Parse(config).layer_specs[0].rope.original_max_position, 32);
  config["rope_scaling"].update({{"rope_type", "llama3"}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}});
  EXPECT_EQ(Parse(config).layer_specs[0].rope.original_max_position, 32);
}

TEST(ConfigDefaults, ThetasAtTheTopCountForRopesByLayerType) {
  for (const auto& [architecture, model_type] :
       {std::pair("Gemma3ForCausalLM", "gemma3_text"), std::pair("Olmo3ForCausalLM", "olmo3")}) {
    json config = Base(architecture, model_type);
    config["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
    config["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}}}};
    config["rope_theta"] = 5000.0;
    config["rope_local_base_freq"] = 700.0;
    EXPECT_EQ(Parse(config).layer_specs[0].rope.theta, 5000);
    EXPECT_EQ(Parse(config).layer_specs[1].rope.theta, config["model_type"] == "olmo3" ? 5000 : 700);
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
    EXPECT_THROW(Parse(config), InputError) << "two ropes for the same layers";
  }
}

}  // namespace
}  // namespace kvanta::models::config_defaults_test
