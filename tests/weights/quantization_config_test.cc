#include "weights/quantization_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/json.h"
#include "kvanta/error.h"

namespace kvanta::weights {
namespace {

using ::testing::HasSubstr;

QuantizationConfig ParseQuantization(const std::string& text) {
  const Json parsed = ParseJson(text, "c");
  return ReadQuantizationConfig(JsonObject(parsed, "c"));
}

std::string QuantizationErrorOf(const std::string& text) {
  try {
    ParseQuantization(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

void ExpectFormat(const QuantizationConfig& config, CodeType codes, GroupScale scales, int64_t group) {
  EXPECT_EQ(config.format.codes, codes);
  EXPECT_EQ(config.format.scales, scales);
  EXPECT_EQ(config.format.group, group);
}

constexpr int64_t kWholeRowGroup = int64_t{1} << 30;

TEST(QuantizationConfig, ReadsEveryMethod) {
  QuantizationConfig config =
      ParseQuantization(R"({"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e4m3",
                                       "modules_to_not_convert": ["lm_head"]})");
  EXPECT_EQ(config.method, QuantMethod::kFp8);
  ExpectFormat(config, CodeType::kE4M3, GroupScale::kF32, 64);
  EXPECT_EQ(config.block, (std::array<int64_t, 2>{128, 64}));
  EXPECT_TRUE(config.IsIgnored("lm_head"));

  config = ParseQuantization(R"({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
                    "kv_cache_scheme": "static"})");
  ExpectFormat(config, CodeType::kE4M3, GroupScale::kF32, kWholeRowGroup);
  EXPECT_EQ(config.kv_cache, "fp8_e4m3");

  config = ParseQuantization(
      R"({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": true, "version": "gemm"})");
  ExpectFormat(config, CodeType::kInt4, GroupScale::kF32, 64);
  EXPECT_EQ(config.group_size, 64);

  config = ParseQuantization(R"({"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": true, "sym": true})");
  ExpectFormat(config, CodeType::kInt8, GroupScale::kF32, kWholeRowGroup);
  EXPECT_TRUE(config.stores_zero_less_one);
  EXPECT_FALSE(
      ParseQuantization(R"({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"})").stores_zero_less_one);

  config = ParseQuantization(R"({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"})");
  ExpectFormat(config, CodeType::kNf4, GroupScale::kF32, 64);
  config = ParseQuantization(
      R"({"quant_method": "bitsandbytes", "load_in_8bit": true, "llm_int8_skip_modules": ["lm_head"]})");
  ExpectFormat(config, CodeType::kInt8, GroupScale::kF32, kWholeRowGroup);

  config = ParseQuantization(R"({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
                    "exclude_modules": ["model.layers.0.self_attn*"]})");
  ExpectFormat(config, CodeType::kE2M1, GroupScale::kE4M3, 16);
  EXPECT_EQ(config.kv_cache, "fp8_e4m3");
  EXPECT_TRUE(config.IsIgnored("model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(config.IsIgnored("model.layers.1.self_attn.q_proj"));

  config = ParseQuantization(R"({"quant_method": "quark", "exclude": ["lm_head"], "kv_cache_quant_config": {},
                    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}})");
  ExpectFormat(config, CodeType::kE2M1, GroupScale::kE8M0, 32);
}

TEST(QuantizationConfig, ReadsGroupsOfCompressedTensors) {
  const auto read = [](const std::string& weights) {
    return ParseQuantization(R"({"quant_method": "compressed-tensors", "ignore": ["re:.*lm_head$"], "config_groups":
                    {"group_0": {"targets": ["Linear"], "weights": {)" +
                             weights + "}}}}");
  };
  QuantizationConfig config = read(R"("num_bits": 4, "type": "int", "group_size": 128, "symmetric": false)");
  ExpectFormat(config, CodeType::kInt4, GroupScale::kF32, 128);
  EXPECT_EQ(config.bits, 4);
  EXPECT_TRUE(config.IsIgnored("lm_head"));
  EXPECT_FALSE(config.IsIgnored("lm_head.other"));
  config = read(R"("num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128])");
  ExpectFormat(config, CodeType::kE4M3, GroupScale::kF32, 128);
  ExpectFormat(read(R"("num_bits": 8, "type": "int", "strategy": "channel")"), CodeType::kInt8, GroupScale::kF32,
               kWholeRowGroup);
  ExpectFormat(read(R"("num_bits": 4, "type": "float", "group_size": 16)"), CodeType::kE2M1, GroupScale::kE4M3, 16);
  ExpectFormat(read(R"("num_bits": 4, "type": "float", "group_size": 32)"), CodeType::kE2M1, GroupScale::kE8M0, 32);
  // Only the cache is declared.
  config = ParseQuantization(R"({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme":
                    {"num_bits": 8, "type": "float"}})");
  EXPECT_EQ(config.method, QuantMethod::kNone);
  EXPECT_EQ(config.kv_cache, "fp8_e4m3");
}

TEST(QuantizationConfig, NamesWhatIsNotSupported) {
  for (const auto& [text, message] : std::initializer_list<std::pair<const char*, const char*>>{
           {R"({"quant_method": "hqq"})", "'hqq'; expected one of fp8"},
           {R"({"quant_method": "fp8", "fmt": "e5m2"})", "expected \"e4m3\""},
           {R"({"quant_method": "fp8", "weight_block_size": [128]})", "two positive sizes"},
           {R"({"quant_method": "fp8", "weight_block_size": [0, 128]})", "two positive sizes"},
           {R"({"quant_method": "fp8", "ignored_layers": "lm_head"})", "a list of names"},
           {R"({"quant_method": "awq", "bits": 3})", "'bits' is 3; expected 4"},
           {R"({"quant_method": "awq", "version": "gemv"})", "expected \"gemm\""},
           {R"({"quant_method": "gptq", "bits": 5})", "2, 3, 4 or 8"},
           {R"({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})", "gptq_v2"},
           {R"({"quant_method": "bitsandbytes"})", "load_in_4bit or load_in_8bit"},
           {R"({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"})", "NVFP4"},
           {R"({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}})", "fp8_e4m3"},
           {R"({"quant_method": "compressed-tensors", "format": "marlin-24"})", "pack-quantized"},
           {R"({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}})", "\"dense\""},
           {R"({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}})",
            "transforms"}}) {
    EXPECT_THAT(QuantizationErrorOf(text), HasSubstr(message)) << text;
  }
}

TEST(QuantizationConfig, PatternsOfIgnoredModules) {
  const auto ignored = [](const std::string& pattern, std::string_view module) {
    QuantizationConfig config;
    config.ignored = {pattern};
    return config.IsIgnored(module);
  };
  EXPECT_TRUE(ignored("model.layers.3.mlp", "model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(ignored("self_attn", "model.layers.3.self_attn.q_proj"));
  EXPECT_FALSE(ignored("model.layers.3", "model.layers.30.mlp.up_proj")) << "a part of a component";
  EXPECT_TRUE(ignored("*layers.3.*", "model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(ignored("*layers.3.*_proj.x", "model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(ignored("re:.*mlp\\.gate$", "model.layers.3.mlp.gate"));
  EXPECT_FALSE(ignored("re:.*mlp\\.gate$", "model.layers.3.mlp.gate_proj"));
  EXPECT_TRUE(ignored("re:model.*self_attn", "model.layers.3.self_attn.q_proj"));
  EXPECT_FALSE(ignored("re:^layers.*", "model.layers.3.mlp.gate_proj"));
  EXPECT_FALSE(ignored("", "a"));
}

// As Python's re.match reads them.
TEST(QuantizationConfig, RegularExpressionsOfIgnoredModules) {
  const auto ignored = [](const std::string& expression, std::string_view module) {
    QuantizationConfig config;
    config.ignored = {"re:" + expression};
    return config.IsIgnored(module);
  };
  const char* query = "model.layers.3.self_attn.q_proj";
  EXPECT_TRUE(ignored(".*(q|k|v)_proj$", query));
  EXPECT_FALSE(ignored(".*(k|v)_proj$", query));
  EXPECT_TRUE(ignored(".*(?:self_attn|mlp)\\..*", query));
  EXPECT_TRUE(ignored("model\\.layers\\.[0-3]\\.", query));
  EXPECT_FALSE(ignored("model\\.layers\\.[^0-3]\\.", query));
  EXPECT_TRUE(ignored("model.layers.\\d+.self", query));
  EXPECT_FALSE(ignored("model.layers.\\d+$", query));
  EXPECT_TRUE(ignored("(a|model)?.layers", query));
  EXPECT_TRUE(ignored("model.layers.(1|3|(5|7)).[a-z_]+.q_proj", query));
  EXPECT_TRUE(ignored("lm_head|.*q_proj", query));
  EXPECT_TRUE(ignored("()*model", query));
  EXPECT_TRUE(ignored("^(?!.*lm_head).*_proj$", query));
  EXPECT_FALSE(ignored("^(?!.*self_attn)", query));
  EXPECT_TRUE(ignored("[]m]odel", query));
  EXPECT_FALSE(ignored("layers", query)) << "from the beginning";
  EXPECT_FALSE(ignored("(a*)*b", std::string(1000, 'a'))) << "in time";
}

TEST(QuantizationConfig, RefusesWhatIsNoPattern) {
  for (const char* expression :
       {"(a", "a)", "[a", "*a", "a{2}", "(?<=a)", "(?!(?!a))", "\\\\1", "a\\\\", "a++", "[b-a]"}) {
    EXPECT_THAT(
        QuantizationErrorOf(std::string(R"({"quant_method": "compressed-tensors", "ignore": ["re:)") + expression +
                            R"("], "config_groups": {"g": {"targets": ["Linear"], "weights":
                                    {"num_bits": 8, "type": "float"}}}})"),
        HasSubstr("ignore"))
        << expression;
  }
}

}  // namespace
}  // namespace kvanta::weights
