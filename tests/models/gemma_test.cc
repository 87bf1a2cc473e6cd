#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "kvanta/error.h"
#include "models/config/config.h"
#include "models/config_json.h"

namespace kvanta::models {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

// The text_config of gemma-3-4b as published: other keys have the class's defaults.
json Gemma3Text() {
  return json::parse(R"({"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 7, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024})");
}

json Gemma3() {
  json config = {{"architectures", {"Gemma3ForConditionalGeneration"}},
                 {"model_type", "gemma3"},
                 {"torch_dtype", "bfloat16"},
                 {"eos_token_id", {1, 106}},
                 {"text_config", Gemma3Text()}};
  return config;
}

TEST(Gemma3Config, DefaultsOfTheClassAndKeysOfTheTop) {
  const ModelConfig config = Parse(Gemma3());
  EXPECT_EQ(config.heads, 8);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.vocab, 262208);
  EXPECT_EQ(config.max_position, 131072) << "scaling included";
  EXPECT_EQ(config.dtype, DType::kBf16);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(1, 106));
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(config.qk_norm, QkNorm::kPerHead);
  EXPECT_EQ(config.norm_weight_offset, 1);
  EXPECT_EQ(config.mlp.activation, kernels::Activation::kGeluTanh);
  EXPECT_DOUBLE_EQ(config.softmax_scale, 1.0 / 16);
  EXPECT_EQ(config.attn_logit_softcapping, 0);
  EXPECT_EQ(config.names.decoders.front().prefix, "language_model.model.");
  EXPECT_THAT(config.SlidingWindows(), ElementsAre(1024, 1024, 1024, 1024, 1024, 0, 1024));
}

TEST(Gemma3Config, BothGenerationsOfRope) {
  json text = Gemma3Text();
  text["architectures"] = {"Gemma3ForCausalLM"};
  text["dtype"] = "bfloat16";
  const ModelConfig first = Parse(text);
  EXPECT_EQ(first.names.decoders.front().prefix, "model.");
  const RopeSpec global = first.layer_specs[5].rope, local = first.layer_specs[0].rope;
  EXPECT_EQ(global.type, RopeType::kLinear);
  EXPECT_EQ(global.theta, 1e6);
  EXPECT_EQ(global.factor, 8);
  EXPECT_EQ(local.type, RopeType::kDefault);
  EXPECT_EQ(local.theta, 1e4);
  text.erase("rope_scaling");
  text["rope_parameters"] = {{"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 1e6}}},
                             {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  text["layer_types"] = json::array();
  for (int layer = 0; layer < 7; ++layer) {
    text["layer_types"].push_back(layer == 5 ? "full_attention" : "sliding_attention");
  }
  const ModelConfig second = Parse(text);
  for (int layer = 0; layer < 7; ++layer) {
    EXPECT_EQ(first.layer_specs[layer].rope, second.layer_specs[layer].rope) << layer;
    EXPECT_EQ(first.layer_specs[layer].visibility, second.layer_specs[layer].visibility) << layer;
  }
}

TEST(Gemma2Config, SoftcapsAndAlternatingWindows) {
  json config = json::parse(R"({"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "query_pre_attn_scalar": 64, "dtype": "bfloat16"})");
  const ModelConfig defaults = Parse(config);
  EXPECT_THAT(defaults.SlidingWindows(), ElementsAre(4096, 0, 4096, 0));
  EXPECT_EQ(defaults.attn_logit_softcapping, 50);
  EXPECT_EQ(defaults.final_logit_softcapping, 30);
  EXPECT_DOUBLE_EQ(defaults.softmax_scale, 1.0 / 8);
  EXPECT_DOUBLE_EQ(defaults.embedding_scale, 8);
  config["final_logit_softcapping"] = nullptr;
  EXPECT_EQ(Parse(config).final_logit_softcapping, 0) << "null is none, not the default";
}

// EmbeddingGemma's window of 512 has 256 tokens on either side of the query.
TEST(Gemma3Config, AttentionInBothDirections) {
  json config = {{"architectures", {"Gemma3TextModel"}},
                 {"model_type", "gemma3_text"},
                 {"num_hidden_layers", 6},
                 {"sliding_window", 512},
                 {"use_bidirectional_attention", true}};
  const ModelConfig both = Parse(config);
  EXPECT_TRUE(both.AttendsInBothDirections());
  EXPECT_FALSE(both.has_lm_head);
  EXPECT_EQ(both.layer_specs[0].visibility,
            (cache::Visibility{cache::VisibilityKind::kSlidingWindow, 257, /*both_directions=*/true}));
  EXPECT_EQ(both.layer_specs[5].visibility,
            (cache::Visibility{cache::VisibilityKind::kFull, 0, /*both_directions=*/true}));
  config["use_bidirectional_attention"] = false;
  EXPECT_FALSE(Parse(config).AttendsInBothDirections());
}

TEST(Gemma3Config, Errors) {
  json config = Gemma3();
  config["text_config"]["hidden_activation"] = "gelu";
  const auto error = [&] {
    try {
      Parse(config);
    } catch (const InputError& refused) {
      return std::string(refused.what());
    }
    return std::string("none");
  };
  EXPECT_THAT(error(), HasSubstr("'text_config.hidden_activation' is 'gelu'; expected silu or gelu_pytorch_tanh"));
  config = Gemma3();
  config["text_config"]["use_bidirectional_attention"] = true;
  EXPECT_THAT(error(), HasSubstr("expected false: only Gemma3TextModel attends in both directions"));
  config = Gemma3();
  config.erase("text_config");
  EXPECT_THAT(error(), HasSubstr("'text_config' is missing"));
}

}  // namespace
}  // namespace kvanta::models
