// Configs of Phi-3, OLMo 2 and 3, Granite, SmolLM3, GLM-4, Ministral and Mistral 3.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

#include "kvanta/error.h"
#include "models/blocks/rope.h"
#include "models/config/config.h"
#include "models/config_json.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::models::dense_test {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

using Refusals = std::initializer_list<std::tuple<const char*, json, const char*>>;

json Base(const char* architecture, const char* model_type) {
  json config = json::parse(R"({"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
    "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1})");
  config["architectures"] = {architecture};
  config["model_type"] = model_type;
  return config;
}

void ExpectRefused(const json& base, Refusals refusals) {
  for (const auto& [key, value, message] : refusals) {
    try {
      Parse(With(base, key, value));
      ADD_FAILURE() << key << " = " << value << " was accepted";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(message)) << key;
    }
  }
}

json LongRope() {
  return {{"type", "longrope"},
          {"short_factor", {1.0, 1.1, 1.2, 1.3, 1.4, 1.5}},
          {"long_factor", {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}}};
}

// Phi-4-mini's kinds: a rotated part of 12 of 16 channels, longrope.
json Phi3() {
  json config = Base("Phi3ForCausalLM", "phi3");
  config["partial_rotary_factor"] = 0.75;
  config["original_max_position_embeddings"] = 128;
  config["rope_scaling"] = LongRope();
  return config;
}

TEST(Phi3Config, LongRopeOfBothGenerations) {
  const ModelConfig first = Parse(Phi3());
  const RopeSpec rope = first.layer_specs[0].rope;
  EXPECT_TRUE(first.qkv_layout == QkvLayout::kConcatenated && first.mlp.kind == MlpKind::kFusedGate);
  EXPECT_DOUBLE_EQ(first.rms_eps, 1e-5) << "the class's default";
  EXPECT_EQ(first.max_position, 512) << "scaling included";
  EXPECT_EQ(rope.type, RopeType::kLongRope);
  EXPECT_EQ(rope.rotary_dim, 12);
  EXPECT_EQ(rope.original_max_position, 128);
  EXPECT_EQ(rope.factor, 4);
  EXPECT_THAT(rope.long_factor, ElementsAre(1, 2, 3, 4, 5, 6));
  json second = Phi3();
  for (const char* key : {"rope_scaling", "partial_rotary_factor", "original_max_position_embeddings"}) {
    second.erase(key);
  }
  second["rope_parameters"] = LongRope();
  second["rope_parameters"].update({{"rope_type", "longrope"}, {"rope_theta", 1e4}, {"partial_rotary_factor", 0.75}});
  second["rope_parameters"]["original_max_position_embeddings"] = 128;
  EXPECT_EQ(Parse(second).layer_specs[0].rope.original_max_position, 4096) << "the class's default comes first";
  second["original_max_position_embeddings"] = 128;
  EXPECT_EQ(Parse(second).layer_specs[0].rope, rope);
  for (const char* name : {"su", "yarn"}) {  // names in the first checkpoints
    json old_name = Phi3();
    old_name["rope_scaling"]["type"] = name;
    EXPECT_EQ(Parse(old_name).layer_specs[0].rope, rope) << name;
  }
}

TEST(Phi3Config, LongFactorsWhereASequenceMayBeLonger) {
  const RopeSpec rope = Parse(Phi3()).layer_specs[0].rope;
  EXPECT_FALSE(UsesLongFactors(rope, 128));
  EXPECT_TRUE(UsesLongFactors(rope, 129));
  const RopeFrequencies short_context = MakeRopeFrequencies(rope, 128), long_context = MakeRopeFrequencies(rope, 129);
  EXPECT_FLOAT_EQ(long_context.inverse[5] * 6 / 1.5F, short_context.inverse[5]);
  EXPECT_FLOAT_EQ(short_context.attention_scaling, std::sqrt(1 + std::log(4.0F) / std::log(128.0F)));
  EXPECT_EQ(long_context.attention_scaling, short_context.attention_scaling);
}

TEST(Phi3Config, WindowsAndErrors) {
  EXPECT_THAT(Parse(Phi3()).SlidingWindows(), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Parse(With(Phi3(), "sliding_window", 32)).SlidingWindows(), ElementsAre(32, 32, 32, 32));
  json few = LongRope(), small = LongRope(), none = LongRope();
  few["long_factor"] = {1.0, 2.0};
  small["short_factor"][3] = 0;
  none.erase("long_factor");
  ExpectRefused(Phi3(), {{"rope_scaling", few, "'rope_scaling.long_factor' is a list of 2; expected a list of 6"},
                         {"rope_scaling", small, "numbers from 0.001"},
                         {"rope_scaling", none, "'rope_scaling.long_factor' is missing"},
                         {"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}, "default or longrope"},
                         {"partial_rotary_factor", 0.7, "an even number of the 16 channels"},
                         {"partial_rotary_factor", 0, "an even number of the 16 channels"},
                         {"original_max_position_embeddings", 1, "from 2 to"}});
}

TEST(OlmoConfig, NormsAfterTheBlocks) {
  const ModelConfig config = Parse(Base("Olmo2ForCausalLM", "olmo2"));
  EXPECT_EQ(config.names.pre_attention_norm, "");
  EXPECT_EQ(config.names.pre_mlp_norm, "");
  EXPECT_EQ(config.names.post_attention_norm, "post_attention_layernorm");
  EXPECT_EQ(config.names.post_mlp_norm, "post_feedforward_layernorm");
  EXPECT_EQ(config.qk_norm, QkNorm::kAllHeads);
  EXPECT_THAT(config.SlidingWindows(), ElementsAre(0, 0, 0, 0));
}

TEST(OlmoConfig, OnlyFullAttentionIsScaled) {
  json config = Base("Olmo3ForCausalLM", "olmo3");
  const json yarn = {{"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 64}};
  config["rope_scaling"] = yarn;
  config["rope_theta"] = 5e5;
  config["sliding_window"] = 32;
  const ModelConfig first = Parse(config);
  EXPECT_THAT(first.SlidingWindows(), ElementsAre(32, 32, 32, 0)) << "full attention in every fourth layer";
  EXPECT_EQ(first.max_position, 512);
  EXPECT_EQ(first.layer_specs[3].rope.type, RopeType::kYarn);
  EXPECT_EQ(first.layer_specs[0].rope.type, RopeType::kDefault);
  EXPECT_EQ(first.layer_specs[0].rope.theta, 5e5);
  json second = config;
  second.erase("rope_scaling");
  second.erase("rope_theta");
  second["rope_parameters"] = {{"full_attention", yarn}, {"sliding_attention", {{"rope_type", "default"}}}};
  const ModelConfig parsed = Parse(second);
  for (int layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(parsed.layer_specs[layer].rope, first.layer_specs[layer].rope) << "5e5 is the class's default";
  }
  config["layer_types"] = {"full_attention", "sliding_attention", "full_attention", "full_attention"};
  EXPECT_EQ(Parse(config).layer_specs[0].rope.type, RopeType::kYarn);
  EXPECT_EQ(Parse(config).layer_specs[1].rope.type, RopeType::kDefault);
  ExpectRefused(config, {{"sliding_window", nullptr, "'sliding_window' is missing"},
                         {"layer_types", {"full_attention"}, "one entry for each of 4 layers"}});
}

TEST(GraniteConfig, Multipliers) {
  json config = Base("GraniteForCausalLM", "granite");
  EXPECT_EQ(Parse(config).softmax_scale, 1) << "the class's default is no 1 / sqrt(head_dim)";
  config.update({{"embedding_multiplier", 12.0},
                 {"attention_multiplier", 0.0078125},
                 {"residual_multiplier", 0.22},
                 {"logits_scaling", 16}});
  const ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.embedding_scale, 12);
  EXPECT_FALSE(parsed.embedding_scale_rounded);
  EXPECT_EQ(parsed.softmax_scale, 0.0078125);
  EXPECT_EQ(parsed.residual_scale, 0.22);
  EXPECT_EQ(parsed.logits_divisor, 16);
  ExpectRefused(config, {{"logits_scaling", 0, "'logits_scaling' is 0"},
                         {"attention_multiplier", -1, "'attention_multiplier' is -1"},
                         {"residual_multiplier", "x", "'residual_multiplier' is 'x'"}});
}

std::vector<int> RotaryDims(const ModelConfig& config) {
  std::vector<int> dims;
  for (const LayerSpec& layer : config.layer_specs) dims.push_back(layer.rope.rotary_dim);
  return dims;
}

TEST(SmolLm3Config, LayersWithoutRope) {
  json config = Base("SmolLM3ForCausalLM", "smollm3");
  EXPECT_THAT(RotaryDims(Parse(config)), ElementsAre(16, 16, 16, 0)) << "every fourth by default";
  EXPECT_EQ(Parse(config).layer_specs[0].rope.theta, 2e6) << "the class's default";
  EXPECT_TRUE(Parse(config).tied_embeddings);
  EXPECT_THAT(RotaryDims(Parse(With(config, "no_rope_layer_interval", 2))), ElementsAre(16, 0, 16, 0));
  config["no_rope_layers"] = {0, 1, 1, 0, 1, 1};  // more than there are layers
  EXPECT_THAT(RotaryDims(Parse(config)), ElementsAre(0, 16, 16, 0));
  config["sliding_window"] = 32;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 0, 0, 0)) << "use_sliding_window is false";
  config["use_sliding_window"] = true;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(32, 0, 0, 32));
  EXPECT_THAT(RotaryDims(Parse(With(config, "no_rope_layers", {false, true, true, true}))), ElementsAre(0, 16, 16, 16));
  EXPECT_THAT(RotaryDims(Parse(With(config, "no_rope_layers", json::array()))), ElementsAre(16, 16, 16, 0));
  ExpectRefused(config, {{"no_rope_layers", {1, 1}, "1 (rope) or 0 (none) for each of 4 layers"},
                         {"no_rope_layers", {1, 1, 2, 1}, "1 (rope) or 0 (none)"},
                         {"no_rope_layers", 3, "is 3; expected a list"}});
}

TEST(GlmConfig, HalfTheChannelsInPairsOfNeighbours) {
  json config = Base("GlmForCausalLM", "glm");
  config["head_dim"] = 16;
  const ModelConfig glm = Parse(config);
  EXPECT_EQ(glm.layer_specs[0].rope.rotary_dim, 8) << "the class's default";
  EXPECT_TRUE(glm.layer_specs[0].rope.interleaved);
  EXPECT_TRUE(glm.qkv_bias && !glm.o_bias && glm.mlp.kind == MlpKind::kFusedGate &&
              glm.qkv_layout == QkvLayout::kSeparate);
  EXPECT_DOUBLE_EQ(glm.rms_eps, 1.5625e-7);
  EXPECT_EQ(glm.names.post_attention_norm, "");
  config["partial_rotary_factor"] = 0.25;
  EXPECT_EQ(Parse(config).layer_specs[0].rope.rotary_dim, 4);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e4}, {"partial_rotary_factor", 1.0}};
  EXPECT_EQ(Parse(config).layer_specs[0].rope.rotary_dim, 16) << "the object's comes first";
  config["architectures"] = {"Glm4ForCausalLM"};
  config["model_type"] = "glm4";
  config["attention_bias"] = false;
  const ModelConfig glm4 = Parse(config);
  EXPECT_FALSE(glm4.qkv_bias);
  EXPECT_EQ(glm4.names.post_attention_norm, "post_self_attn_layernorm");
  EXPECT_EQ(glm4.names.pre_mlp_norm, "post_attention_layernorm");
  EXPECT_EQ(glm4.names.post_mlp_norm, "post_mlp_layernorm");
}

TEST(MinistralConfig, WindowsByLayer) {
  json config = With(Base("MinistralForCausalLM", "ministral"), "sliding_window", 32);
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(32, 32, 32, 32));
  config["layer_types"] = {"full_attention", "sliding_attention", "sliding_attention", "sliding_attention"};
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 32, 32, 32));
  ExpectRefused(config, {{"sliding_window", nullptr, "no 'sliding_attention' where"}});
  config.erase("sliding_window");
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 4096, 4096, 4096)) << "the class's default";
}

json Ministral3() {
  json config = Base("Ministral3ForCausalLM", "ministral3");
  config["head_dim"] = 16;
  config["rope_parameters"] = {{"rope_type", "yarn"},
                               {"factor", 8.0},
                               {"mscale", 1.0},
                               {"mscale_all_dim", 1.0},
                               {"llama_4_scaling_beta", 0.1},
                               {"original_max_position_embeddings", 64}};
  return config;
}

TEST(MinistralConfig, QueriesGrowWithThePosition) {
  const RopeSpec rope = Parse(Ministral3()).layer_specs[0].rope;
  EXPECT_EQ(rope.llama_4_scaling_beta, 0.1);
  EXPECT_EQ(rope.original_max_position, 64);
  std::vector<float> table(200 * 16, 1);
  ScaleQueryTable(rope, table);
  EXPECT_EQ(table[63 * 16 + 15], 1);
  EXPECT_FLOAT_EQ(table[64 * 16], 1 + 0.1F * std::log(2.0F));
  EXPECT_FLOAT_EQ(table[199 * 16 + 3], 1 + 0.1F * std::log(4.0F));
  json config = Ministral3();
  config["rope_parameters"] = nullptr;
  const RopeSpec missing = Parse(config).layer_specs[0].rope;
  EXPECT_EQ(missing.type, RopeType::kYarn) << "the class's default";
  EXPECT_EQ(missing.theta, 1e6);
  EXPECT_EQ(missing.factor, 16);
  EXPECT_EQ(missing.original_max_position, 16384);
  config.erase("rope_parameters");
  EXPECT_EQ(Parse(config).layer_specs[0].rope, missing);
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 2.0}};
  EXPECT_EQ(Parse(config).layer_specs[0].rope.type, RopeType::kLinear) << "the older key replaces it";
}

TEST(Mistral3Config, LanguageModelOfEitherClass) {
  json text = Ministral3();
  text.erase("architectures");
  const json config = {{"architectures", {"Mistral3ForConditionalGeneration"}},
                       {"model_type", "mistral3"},
                       {"torch_dtype", "bfloat16"},
                       {"text_config", text}};
  EXPECT_EQ(Parse(config).layer_specs[0].rope.llama_4_scaling_beta, 0.1);
  EXPECT_EQ(Parse(config).names.decoders[0].prefix, "language_model.model.");
  EXPECT_EQ(Parse(config).names.decoders[1].lm_head, "lm_head");
  EXPECT_TRUE(Parse(config).tied_embeddings) << "the class's default";
  EXPECT_FALSE(Parse(With(config, "tie_word_embeddings", false)).tied_embeddings);
  text["model_type"] = "mistral";
  text["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e9}};
  EXPECT_EQ(Parse(With(config, "text_config", With(text, "sliding_window", nullptr))).layer_specs[0].rope.theta, 1e9);
  text["model_type"] = "mistral9";
  ExpectRefused(config, {{"text_config", text, "'text_config.model_type' is 'mistral9'; expected one of llama, mis"}});
}

// transformers ties embeddings only to an output matrix that is absent or the same.
TEST(ModelConfig, AnOutputMatrixOfItsOwnIsUsed) {
  const weights::TempFolder folder;
  json config = Base("GraniteForCausalLM", "granite");
  config["tie_word_embeddings"] = true;
  folder.Write("config.json", config.dump());
  const auto is_tied_with = [&](const char* name, float value) {
    weights::SafetensorsWriter writer;
    writer.Add("model.embed_tokens.weight", {2}, {1.0F, 2.0F});
    writer.Add(name, {2}, {1.0F, value});
    folder.Write("model.safetensors", writer.File());
    return ReadConfig(folder.Path()).tied_embeddings;
  };
  EXPECT_TRUE(is_tied_with("model.norm.weight", 3));
  EXPECT_TRUE(is_tied_with("lm_head.weight", 2));
  EXPECT_FALSE(is_tied_with("lm_head.weight", 3));
}

}  // namespace
}  // namespace kvanta::models::dense_test
