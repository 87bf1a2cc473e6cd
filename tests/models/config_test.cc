#include "models/config/config.h"
#include "models/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <tuple>

#include "kvanta/error.h"
#include "weights/safetensors_bytes.h"
#include "weights/temp_folder.h"

namespace kvanta::models {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

json Llama() {
  return json::parse(R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 100, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "rope_theta": 10000.0, "tie_word_embeddings": true, "bos_token_id": 1,
    "eos_token_id": 2})");
}

json Qwen2() {
  json config = Llama();
  config["architectures"] = {"Qwen2ForCausalLM"};
  config["model_type"] = "qwen2";
  return config;
}

// DeepSeek V2 with layers of experts.
json DeepseekV2() {
  json config = Llama();
  config.update(json::parse(R"({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": null, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16,
    "v_head_dim": 20, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2})"));
  return config;
}

std::string ErrorOf(const json& config) {
  try {
    Parse(config);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

// The base with one key changed.
TEST(Config, Llama) {
  const ModelConfig config = Parse(Llama());
  EXPECT_EQ(config.architecture, "LlamaForCausalLM");
  EXPECT_EQ(config.dtype, DType::kBf16);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.layer_specs[0].rope.rotary_dim, 16);
  EXPECT_EQ(config.kv_heads, 2);
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_FALSE(config.qkv_bias || config.o_bias || config.mlp.bias || config.qk_norm != QkNorm::kNone);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2));
  EXPECT_EQ(config.bos_token_id, 1);
  EXPECT_EQ(config.declared_kv_cache, "");
  EXPECT_THAT(config.SlidingWindows(), ElementsAre(0, 0, 0));
}

TEST(Config, BothGenerationsSayTheSame) {
  json old_config = Llama();
  old_config["rope_scaling"] = {{"rope_type", "llama3"},
                                {"factor", 8.0},
                                {"low_freq_factor", 1.0},
                                {"high_freq_factor", 4.0},
                                {"original_max_position_embeddings", 128}};
  json new_config = old_config;
  new_config["rope_parameters"] = new_config["rope_scaling"];
  new_config["rope_parameters"]["rope_theta"] = new_config["rope_theta"];
  new_config["dtype"] = new_config["torch_dtype"];
  for (const char* key : {"rope_scaling", "rope_theta", "torch_dtype"}) new_config.erase(key);
  EXPECT_EQ(Parse(old_config).layer_specs[0].rope, Parse(new_config).layer_specs[0].rope);
  EXPECT_EQ(Parse(old_config).layer_specs[0].rope.type, RopeType::kLlama3);
  EXPECT_EQ(Parse(old_config).layer_specs[0].rope.original_max_position, 128);
  EXPECT_EQ(Parse(old_config).dtype, Parse(new_config).dtype);
  old_config["rope_scaling"].erase("rope_type");
  old_config["rope_scaling"]["type"] = "llama3";  // the first name of the key
  EXPECT_EQ(Parse(old_config).layer_specs[0].rope, Parse(new_config).layer_specs[0].rope);
}

TEST(Config, ScalingStretchesTheContext) {
  const json linear = {{"rope_type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(Parse(With(Llama(), "rope_scaling", linear)).max_position, 2048);
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 256}};
  EXPECT_EQ(Parse(With(Llama(), "rope_scaling", yarn)).max_position, 1024);
}

// Its frequencies beyond the original length depend on the sequence's length (docs/adr/0021).
TEST(Config, DynamicRopeIsTheDefaultUpToTheOriginalLength) {
  const ModelConfig config = Parse(With(Llama(), "rope_scaling", {{"rope_type", "dynamic"}, {"factor", 4.0}}));
  EXPECT_EQ(config.max_position, 512);
  EXPECT_EQ(config.layer_specs[0].rope.type, RopeType::kDefault);
}

TEST(Config, HeadDimOfItsOwn) {
  EXPECT_EQ(Parse(With(Llama(), "head_dim", 32)).head_dim, 32);
  json qwen3 = With(Qwen2(), "architectures", {"Qwen3ForCausalLM"});
  qwen3["model_type"] = "qwen3";
  EXPECT_EQ(Parse(qwen3).head_dim, 128);  // the class's default, not hidden / heads
  EXPECT_EQ(Parse(qwen3).qk_norm, QkNorm::kPerHead);
}

TEST(Config, Biases) {
  EXPECT_TRUE(Parse(Qwen2()).qkv_bias);
  EXPECT_FALSE(Parse(Qwen2()).o_bias);
  EXPECT_TRUE(Parse(With(Llama(), "attention_bias", true)).o_bias);
  EXPECT_TRUE(Parse(With(Llama(), "mlp_bias", true)).mlp.bias);
}

TEST(Config, WindowsOfQwen2) {
  json config = With(Qwen2(), "sliding_window", 16);
  config["max_window_layers"] = 1;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 0, 0));  // use_sliding_window is false
  config["use_sliding_window"] = true;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 16, 16));
  config["layer_types"] = {"sliding_attention", "full_attention", "full_attention"};
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(16, 0, 0));
  config["layer_types"] = {"full_attention"};
  EXPECT_THAT(ErrorOf(config), HasSubstr("one entry for each of 3"));
  config["layer_types"] = {"full_attention", "linear_attention", "full_attention"};
  EXPECT_THAT(ErrorOf(config), HasSubstr("'sliding_attention' only"));
}

TEST(Config, WindowOfMistral) {
  json config = With(Llama(), "architectures", {"MistralForCausalLM"});
  config["model_type"] = "mistral";
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(4096, 4096, 4096)) << "the class's default";
  config["sliding_window"] = 32;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(32, 32, 32));
  config["sliding_window"] = nullptr;
  EXPECT_THAT(Parse(config).SlidingWindows(), ElementsAre(0, 0, 0));
}

TEST(Config, DeepseekV2) {
  json config = DeepseekV2();
  ModelConfig parsed = Parse(config);
  EXPECT_EQ(parsed.kv_heads, 1);
  EXPECT_EQ(parsed.head_dim, 32);
  EXPECT_EQ(parsed.layer_specs[0].rope.rotary_dim, 16);
  EXPECT_EQ(
      parsed.mla,
      (MlaConfig{
          .kv_lora_rank = 32, .q_lora_rank = 0, .qk_nope_head_dim = 24, .qk_rope_head_dim = 16, .v_head_dim = 20}));
  EXPECT_DOUBLE_EQ(parsed.softmax_scale, 1 / std::sqrt(40.0));
  EXPECT_EQ(parsed.moe, (kernels::MoeConfig{.num_experts = 8,
                                            .num_experts_per_tok = 3,
                                            .moe_intermediate_size = 24,
                                            .shared_expert_intermediate_size = 48}));  // greedy: no groups
  EXPECT_FALSE(parsed.layer_specs[0].moe);
  EXPECT_TRUE(parsed.layer_specs[1].moe);
  config["topk_method"] = "group_limited_greedy";
  EXPECT_EQ(Parse(config).moe.n_group, 4);
  config["first_k_dense_replace"] = 3;
  EXPECT_EQ(Parse(config).moe, kernels::MoeConfig{});

  config = DeepseekV2();
  config["architectures"] = {"DeepseekV3ForCausalLM"};
  config["model_type"] = "deepseek_v3";
  config["q_lora_rank"] = 48;
  config["num_nextn_predict_layers"] = 1;
  config["rope_scaling"] = {{"type", "yarn"}, {"factor", 40}, {"mscale", 1.0}, {"mscale_all_dim", 0.5}};
  parsed = Parse(config);
  EXPECT_EQ(parsed.mla.q_lora_rank, 48);
  EXPECT_EQ(parsed.num_nextn_predict_layers, 1);
  EXPECT_TRUE(parsed.moe.scoring_func == kernels::ScoringFunc::kSigmoid && parsed.moe.norm_topk_prob);
  EXPECT_EQ(parsed.moe.topk_group, 2);
  const double mscale = 0.1 * 0.5 * std::log(40.0) + 1;
  EXPECT_DOUBLE_EQ(parsed.softmax_scale, mscale * mscale / std::sqrt(40.0));
}

TEST(Config, ErrorsOfLatents) {
  for (const auto& [key, value, message] : std::initializer_list<std::tuple<const char*, json, const char*>>{
           {"kv_lora_rank", 1024, "'kv_lora_rank' is 1024; expected an integer from 8 to 512"},
           {"kv_lora_rank", 20, "a multiple of 8"},
           {"qk_rope_head_dim", 15, "an even number"},
           {"v_head_dim", nullptr, "'v_head_dim' is missing"},
           {"num_experts_per_tok", 9, "from 1 to 8"},
           {"moe_layer_freq", 2, "expected"},
           {"scoring_func", "sigmoid", "expected softmax"},
           {"topk_method", "noaux_tc", "greedy or group_limited_greedy"},
           {"norm_topk_prob", true, "expected false"}}) {
    EXPECT_THAT(ErrorOf(With(DeepseekV2(), key, value)), HasSubstr(message)) << key;
  }
  json groups = With(DeepseekV2(), "topk_method", "group_limited_greedy");
  EXPECT_THAT(ErrorOf(With(groups, "n_group", 3)), HasSubstr("a divisor of n_routed_experts (8)"));
  EXPECT_THAT(ErrorOf(With(groups, "topk_group", 1)), HasSubstr("at least num_experts_per_tok (3)"));
}

TEST(Config, DeclaredKvCache) {
  json scheme = {{"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}, {"dynamic", false}, {"symmetric", true}};
  const auto with_scheme = [&] {
    return With(
        Llama(), "quantization_config",
        {{"quant_method", "compressed-tensors"}, {"config_groups", json::object()}, {"kv_cache_scheme", scheme}});
  };
  EXPECT_EQ(Parse(with_scheme()).declared_kv_cache, "fp8_e4m3");
  scheme["strategy"] = "attn_head";
  EXPECT_EQ(Parse(with_scheme()).declared_kv_cache, "fp8_e4m3");
  // Not known: an explicit format overrides it.
  const std::pair<json, const char*> unknown[] = {
      {{{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}, "kv_cache_scheme.strategy' is 'channel'"},
      {{{"num_bits", 8}, {"type", "float"}, {"strategy", "token"}}, "kv_cache_scheme.strategy' is 'token'"},
      {{{"num_bits", 8}, {"type", "int"}}, "'int'; expected \"float\""},
      {{{"num_bits", 6}, {"type", "float"}}, "8 (FP8) or 4 (NVFP4)"},
      {{{"num_bits", 8}, {"type", "float"}, {"symmetric", false}}, "expected true"},
      {{{"num_bits", 8}, {"type", "float"}, {"dynamic", true}}, "expected false"},
      {{{"num_bits", 8}, {"type", "float"}, {"dynamic", "local"}}, "expected false"},
  };
  for (const auto& [arguments, error] : unknown) {
    scheme = arguments;
    const ModelConfig config = Parse(with_scheme());
    EXPECT_THAT(config.declared_kv_cache_error, HasSubstr(error));
    EXPECT_EQ(config.declared_kv_cache, "");
  }
  scheme = {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}, {"dynamic", "local"}};
  EXPECT_EQ(Parse(with_scheme()).declared_kv_cache, "nvfp4");
}

TEST(Config, EveryDeclarationIsSeen) {
  const json fp8 = {{"num_bits", 8}, {"type", "float"}, {"dynamic", false}};
  const json quark = {{"output_tensors", {{"dtype", "fp8_e4m3"}, {"is_dynamic", false}}}};
  const auto groups = [](const json& group) {
    return json{{"quant_method", "compressed-tensors"}, {"config_groups", {{"group_0", group}}}};
  };
  const std::pair<json, const char*> declarations[] = {
      {groups({{"targets", {"LlamaAttention"}}, {"input_activations", fp8}}), "fp8_e4m3"},
      {groups({{"targets", {"re:.*self_attn$"}}, {"input_activations", fp8}}), "fp8_e4m3"},
      {groups({{"targets", {"re:.*k_proj", "re:.*v_proj"}}, {"output_activations", fp8}}), "fp8_e4m3"},
      {groups({{"targets", {"Linear"}}, {"input_activations", fp8}}), ""},
      {{{"quant_method", "quark"}, {"kv_cache_quant_config", {{"*k_proj", quark}}}}, "fp8_e4m3"},
      {{{"quant_method", "quark"},
        {"layer_quant_config", {{"*k_proj", quark}, {"*v_proj", quark}}},
        {"export", {{"kv_cache_group", {"*k_proj", "*v_proj"}}}}},
       "fp8_e4m3"},
      {{{"quant_method", "fp8"}, {"static_kv_dtype", "fp8"}}, "fp8_e4m3"},
      {{{"quant_method", "fp8"}, {"static_kv_dtype", "float16"}}, ""},
      {{{"quant_method", "modelopt"}, {"kv_cache_quant_algo", "FP8_AFFINE"}}, "k=fp8_e4m3+mean,v=fp8_e4m3"},
      {{{"quant_method", "modelopt"}, {"kv_cache_quant_algo", "NVFP4_AFFINE"}}, "k=nvfp4+mean,v=nvfp4"},
  };
  for (const auto& [declaration, scheme] : declarations) {
    const ModelConfig config = Parse(With(Llama(), "quantization_config", declaration));
    EXPECT_EQ(config.declared_kv_cache, scheme) << declaration;
    EXPECT_EQ(config.declared_kv_cache_error, "") << declaration;
  }
  for (const json& unknown : {json{{"quant_method", "quark"}, {"export", {{"kv_cache_group", {"*k_proj"}}}}},
                              json{{"quant_method", "fp8"}, {"static_kv_dtype", "int4"}},
                              json{{"quant_method", "modelopt"}, {"kv_cache_quant_algo", "INT8"}}}) {
    EXPECT_NE(Parse(With(Llama(), "quantization_config", unknown)).declared_kv_cache_error, "") << unknown;
  }
}

// ModelOpt's search of a scheme for each layer, as hf_quant_config.json and config.json have it.
json MixedKvCache(const json& layers, const std::string& algorithm = "MIXED_PRECISION") {
  return {{"quant_method", "modelopt"},      {"quant_algo", "MIXED_PRECISION"},  {"quantized_layers", json::object()},
          {"config_groups", json::object()}, {"kv_cache_quant_algo", algorithm}, {"kv_cache_quantized_layers", layers},
          {"kv_cache_schema_version", 1}};
}

TEST(Config, DeclaredKvCacheOfLayers) {
  const auto with = [](const json& layers, const std::string& algorithm = "MIXED_PRECISION") {
    return With(With(Llama(), "num_hidden_layers", 4), "quantization_config", MixedKvCache(layers, algorithm));
  };
  const json fp8 = {{"quant_algo", "FP8"}}, nvfp4 = {{"quant_algo", "NVFP4"}},
             mixed = {{"quant_algo", "FP8_K_NVFP4_V"}};
  const json layers = {{"model.layers.0.self_attn", fp8},
                       {"model.layers.2.self_attn", nvfp4},
                       {"model.language_model.layers.3.self_attn", mixed}};
  ModelConfig config = Parse(with(layers));
  EXPECT_THAT(config.declared_kv_cache_layers, ElementsAre("fp8_e4m3", "", "nvfp4", "k=fp8_e4m3,v=nvfp4"));
  EXPECT_EQ(config.declared_kv_cache, "");
  EXPECT_EQ(config.quantization.method, weights::QuantMethod::kNone) << "the weights are not quantized";
  AddHfQuantConfig(json{{"quantization", MixedKvCache(layers)}}.dump(), "h", config);
  const json other = json{{"quantization", MixedKvCache({{"model.layers.0.self_attn", nvfp4}})}};
  AddHfQuantConfig(other.dump(), "h", config);
  EXPECT_THAT(config.declared_kv_cache_error, HasSubstr("but config.json"));
  EXPECT_THAT(config.declared_kv_cache_layers, ElementsAre());

  config = Parse(with({{"model.layers.1.self_attn", fp8}}, "FP8"));
  EXPECT_THAT(config.declared_kv_cache_layers, ElementsAre("", "fp8_e4m3", "", ""));
  json all;
  for (int layer = 0; layer < 4; ++layer) all["model.layers." + std::to_string(layer) + ".self_attn"] = mixed;
  config = Parse(with(all, "FP8_K_NVFP4_V"));
  EXPECT_THAT(config.declared_kv_cache_layers, ElementsAre());
  EXPECT_EQ(config.declared_kv_cache, "k=fp8_e4m3,v=nvfp4");

  const auto error_of = [&](const json& text) { return Parse(text).declared_kv_cache_error; };
  EXPECT_THAT(error_of(with({{"model.layers.1.self_attn", {{"quant_algo", "INT4"}}}})),
              HasSubstr("quant_algo' is 'INT4'; expected FP8, NVFP4, FP8_K_NVFP4_V"));
  EXPECT_THAT(error_of(with({{"model.layers.4.self_attn", fp8}})), HasSubstr("has layer 4; the model has 4"));
  EXPECT_THAT(error_of(with({{"self_attn", fp8}})), HasSubstr("a module of a layer, such as model.layers.0.self_attn"));
  EXPECT_THAT(error_of(with({{"model.layers.1.self_attn", fp8}, {"model.layers.1.attn", nvfp4}})),
              HasSubstr("that layer 1 has by another module"));
  EXPECT_THAT(error_of(with(json::object())), HasSubstr("next to it with the algorithm of each layer"));
  // ModelOpt writes names of algorithms where compressed-tensors has no description.
  const json named = {{"quant_method", "modelopt"}, {"kv_cache_scheme", "NVFP4"}};
  EXPECT_EQ(Parse(With(Llama(), "quantization_config", named)).declared_kv_cache, "nvfp4");
}

TEST(Config, CachesOfOtherProgramsAreNamed) {
  ModelConfig config = Parse(Llama());
  AddGenerationConfig(R"({"cache_implementation": "static"})", "g", config);
  EXPECT_EQ(config.kv_cache_note, "");
  AddGenerationConfig(R"({"cache_implementation": "quantized", "cache_config": {"nbits": 4}})", "g", config);
  EXPECT_THAT(config.kv_cache_note, HasSubstr("g: cache_implementation 'quantized'"));
  AddModelSlimConfig(R"({"model_quant_type": "FLOAT", "model.norm.weight": "FLOAT"})", "d", config);
  EXPECT_EQ(config.declared_kv_cache, "");
  AddModelSlimConfig(R"({"kv_cache_type": "C8"})", "d", config);
  EXPECT_EQ(config.declared_kv_cache, "int8");
  AddModelSlimConfig(R"({"kv_cache_type": "C4"})", "d", config);
  EXPECT_THAT(config.declared_kv_cache_error, HasSubstr("'kv_cache_type' is 'C4'"));
}

TEST(Config, HfQuantConfig) {
  ModelConfig config = Parse(Llama());
  AddHfQuantConfig(R"({"producer":{},"quantization":{"quant_algo":null,"kv_cache_quant_algo":"FP8"}})", "h", config);
  EXPECT_EQ(config.declared_kv_cache, "fp8_e4m3");
  for (const char* other : {"NVFP4", "INT3"}) {
    ModelConfig differing = config;
    AddHfQuantConfig(fmt::format(R"({{"quantization":{{"kv_cache_quant_algo":"{}"}}}})", other), "h", differing);
    EXPECT_NE(differing.declared_kv_cache_error, "");
    EXPECT_EQ(differing.declared_kv_cache, "");
  }
  EXPECT_EQ(config.quantization.method, weights::QuantMethod::kNone);
  AddHfQuantConfig(R"({"quantization":{"quant_algo":"FP8"}})", "h", config);
  EXPECT_EQ(config.quantization.method, weights::QuantMethod::kModelOpt);
  EXPECT_THROW(AddHfQuantConfig(R"({"quantization":{"quant_algo":"W4A8_AWQ"}})", "h", config), InputError);
  EXPECT_THROW(AddHfQuantConfig("{}", "h", config), InputError);
}

TEST(Config, QuantizedWeightsAreDeclaredInEitherFile) {
  const json awq = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"zero_point", true}};
  for (const char* key : {"quantization_config", "compression_config"}) {
    EXPECT_EQ(Parse(With(Llama(), key, awq)).quantization.method, weights::QuantMethod::kAwq) << key;
  }
  EXPECT_EQ(Parse(Llama()).quantization.method, weights::QuantMethod::kNone);
  EXPECT_THAT(ErrorOf(With(Llama(), "quantization_config", {{"quant_method", "aqlm"}})),
              HasSubstr("'aqlm'; expected one of fp8, fbgemm_fp8, compressed-tensors, modelopt, quark, awq, gptq, "
                        "awq_marlin, gptq_marlin, auto-round, intel/auto-round, bitsandbytes, mxfp4"));
  EXPECT_EQ(Parse(With(Llama(), "quantization_config", json::object())).quantization.method,
            weights::QuantMethod::kNone);
}

TEST(Config, EosIdsOfBothFiles) {
  ModelConfig config = Parse(With(Llama(), "eos_token_id", {2, 5}));
  AddGenerationConfig(R"({"eos_token_id": [5, 7]})", "g", config);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 5, 7));
  AddGenerationConfig(R"({"eos_token_id": [100, -1]})", "g", config);  // never sampled
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 5, 7));
  EXPECT_THROW(AddGenerationConfig(R"({"eos_token_id": "x"})", "g", config), InputError);
}

struct BadValue {
  const char* key;
  const char* value;
  const char* message;
};

TEST(Config, ErrorsNameKeyValueAndAlternatives) {
  for (const auto& [key, value, message] : std::initializer_list<BadValue>{
           {"architectures", "[\"BloomForCausalLM\"]", "known ones: "},
           {"architectures", "[3]", "a list with a class, such as 'LlamaForCausalLM'"},
           {"model_type", "\"qwen2\"", "expected 'llama'"},
           {"hidden_size", "-64", "key 'hidden_size' is -64; expected an integer from 1 to"},
           {"hidden_size", "64.5", "is 64.5; expected an integer"},
           {"hidden_size", "\"64\"", "is '64'; expected an integer"},
           {"hidden_size", "18446744073709551615", "expected an integer"},
           {"hidden_size", "null", "'hidden_size' is missing"},
           {"hidden_size", "66", "a divisor of hidden_size (66), or head_dim"},
           {"hidden_size", "48", "heads of 12 channels; supported are multiples of 8 up to 512"},
           {"head_dim", "516", "from 8 to 512"},
           {"num_key_value_heads", "3", "a divisor of num_attention_heads (4)"},
           {"num_key_value_heads", "8", "from 1 to 4"},
           {"num_hidden_layers", "0", "from 1 to 4096"},
           {"hidden_act", "\"gelu\"", "expected silu"},
           {"torch_dtype", "\"float8_e4m3fn\"", "bfloat16, float16 or float32"},
           {"tie_word_embeddings", "1", "true or false"},
           {"rms_norm_eps", "-1", "a number from 0 to 1"},
           {"rms_norm_eps", "1e999", "not valid JSON"},
           {"eos_token_id", "1.5", "token ids below vocab_size (100)"},
           {"is_causal", "false", "attention in both directions is not supported"},
           {"rms_norm_eps", "Infinity", "is 'Infinity'; expected a number"},
           {"rope_theta", "0", "'rope_theta' is 0"},
           {"partial_rotary_factor", "0.5", "expected 1"},
           {"rope_scaling", "{\"type\":\"ntk\"}", "default, linear, dynamic, llama3, yarn, longrope or proportional"},
           {"rope_scaling", "{\"type\":\"linear\"}", "'rope_scaling.factor' is missing"},
           {"rope_scaling", "{\"type\":\"linear\",\"factor\":0.5}", "from 1"},
           {"rope_scaling", "3", "expected an object"},
           {"rope_parameters", "{\"rope_theta\":5.0}", "the same as at the top"},
           {"rope_parameters", "{\"full_attention\":{\"rope_theta\":1e4}}", "no nested object"},
           {"rope_scaling", R"({"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":3})",
            "at least low_freq_factor"}}) {
    json config = Llama();
    std::string text = With(config, key, "@").dump();
    text.replace(text.find("\"@\""), 3, value);
    try {
      ParseConfig(text, "config.json");
      ADD_FAILURE() << key << " = " << value << " was accepted";
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr(message)) << key;
      EXPECT_THAT(error.what(), testing::StartsWith("config.json: ")) << key;
    }
  }
}

// An old config.json may not say how the weights are stored: the embeddings do.
TEST(Config, TypeOfTheEmbeddingsWhereNoneIsGiven) {
  const weights::TempFolder folder;
  json config = Llama();
  config.erase("torch_dtype");
  folder.Write("config.json", config.dump());
  EXPECT_FALSE(ReadConfig(folder.Path()).dtype_known);
  weights::SafetensorsWriter writer;
  writer.Add("model.embed_tokens.weight", {1}, {1.0F});
  folder.Write("model.safetensors", writer.File());
  EXPECT_EQ(ReadConfig(folder.Path()).dtype, DType::kF32);
  EXPECT_TRUE(ReadConfig(folder.Path()).dtype_known);
}

TEST(Config, ReadsAFileOfAnyName) {
  const weights::TempFolder folder;
  const std::string config = folder.Write("config.json", Llama().dump());
  const std::string other = folder.Write("shape.json", Llama().dump());
  folder.Write("generation_config.json", R"({"eos_token_id": 9})");
  EXPECT_THAT(ReadConfig(config).eos_token_ids, ElementsAre(2, 9)) << "that of its folder";
  EXPECT_THAT(ReadConfig(other).eos_token_ids, ElementsAre(2)) << "read alone";
  json silent = Llama();
  silent.erase("torch_dtype");
  EXPECT_FALSE(ReadConfig(folder.Write("shape.json", silent.dump())).dtype_known);
}

TEST(Config, ReadsAFolder) {
  const weights::TempFolder folder;
  EXPECT_THROW(ReadConfig(folder.Path()), InputError);
  EXPECT_THROW(ReadConfig(folder.Path() + "/none"), InputError);
  folder.Write("config.json", Llama().dump());
  folder.Write("generation_config.json", R"({"eos_token_id": 9})");
  folder.Write("hf_quant_config.json", R"({"quantization": {"kv_cache_quant_algo": "FP8"}})");
  const ModelConfig config = ReadConfig(folder.Path());
  EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 9));
  EXPECT_EQ(config.declared_kv_cache, "fp8_e4m3");
}

}  // namespace
}  // namespace kvanta::models
