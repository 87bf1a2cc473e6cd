// Static scales: given, measured, or missing; the scales that the cache reports.
#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "engine/requests.h"

namespace kvanta::engine {
namespace {

struct Log {
  std::vector<std::string> lines;
  std::function<void(const std::string&)> Sink() {
    return [this](const std::string& line) { lines.push_back(line); };
  }
};

TEST(Scales, MissingScalesAreOneWithAWarning) {
  Log log;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.on_warning = log.Sink();
  const Engine engine(config);
  for (const LayerStats& layer : engine.Stats().layers) {
    EXPECT_EQ(layer.k_scale, (std::vector<float>{1, 1}));
    EXPECT_EQ(layer.v_scale, (std::vector<float>{1, 1}));
  }
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_EQ(log.lines[0],
            "no KV scales were given: layers 0-1 use 1.0; 0.0000 % of the values of a probe of 64 tokens saturated; "
            "see quantization_param_path and calculate_kv_scales");
}

TEST(Scales, TheWarningMeasuresSaturation) {
  Log log;
  TinyShape shape;
  shape.key_gain = 2000;
  const TinyModel loud(shape);
  EngineConfig config = TinyConfig(loud, "fp8_e4m3");
  config.kv_cache_dtype_layers = "1=bf16";
  config.on_warning = log.Sink();
  Engine engine(config);
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("layers 0 use 1.0"), std::string::npos) << log.lines[0];
  EXPECT_EQ(log.lines[0].find(" 0.0000 %"), std::string::npos) << log.lines[0];
  std::mt19937_64 random(1);
  ColdLogits(engine, RandomTokens(random, 64));
  EXPECT_GT(engine.Stats().layers[0].k_saturated, 0);
  EXPECT_EQ(engine.Stats().layers[0].v_saturated, 0);
}

TEST(Scales, FormatsWithoutStaticScalesDoNotWarn) {
  for (const char* format : {"bf16", "int8", "int4"}) {
    Log log;
    EngineConfig config = TinyConfig(Model(), format);
    config.calculate_kv_scales = true;
    config.on_warning = log.Sink();
    Engine engine(config);
    RunOne(engine, {.id = "a", .prompt = {1, 2, 3}, .sampling = Greedy(2)});
    EXPECT_TRUE(log.lines.empty()) << log.lines.front();
    EXPECT_TRUE(engine.Stats().layers[0].k_scale.empty());
  }
}

TEST(Scales, AFilesScalesReachTheCache) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.quantization_param_path = folder.Write(
      "scales.json",
      R"({"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.25, "1": 0.5}}}})");
  config.calculate_kv_scales = true;  // the file comes first
  Engine engine(config);
  RunOne(engine, {.id = "a", .prompt = {1, 2, 3}, .sampling = Greedy(2)});
  EXPECT_EQ(engine.Stats().layers[0].k_scale, (std::vector<float>{0.25F, 0.25F}));
  EXPECT_EQ(engine.Stats().layers[1].v_scale, (std::vector<float>{0.5F, 0.5F}));
  // Not only reported: other bits come out than with 1.0.
  EngineConfig unit = TinyConfig(Model(), "fp8_e4m3");
  Engine other(unit);
  std::mt19937_64 random(1);
  const auto tokens = RandomTokens(random, 40);
  EXPECT_NE(ColdLogits(engine, tokens), ColdLogits(other, tokens));
}

TEST(Scales, ABrokenFileIsAnError) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.quantization_param_path = folder.Write("scales.json", "{\"kv_cache\": {}}");
  EXPECT_THROW(Engine{config}, InputError);
  config.quantization_param_path = folder.Path() + "/absent.json";
  EXPECT_THROW(Engine{config}, InputError);
}

TEST(Scales, ACacheFolderThatCannotBeMadeIsAnErrorBeforeTheyAreMeasured) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.calculate_kv_scales = true;
  config.kv_cache_dir = folder.Write("file", "") + "/cache";
  EXPECT_THROW(Engine{config}, InputError);
}

TEST(Scales, MeasuredOnTheFirstPromptAndFrozen) {
  Log log;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.calculate_kv_scales = true;
  config.on_warning = log.Sink();
  Engine engine(config);
  EXPECT_TRUE(log.lines.empty());
  std::mt19937_64 random(3);
  const auto prompt = RandomTokens(random, 100);
  const auto first = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(10)});
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("layers 0-1 measured on the first 100 tokens and frozen"), std::string::npos);
  const EngineStats after_first = engine.Stats();
  for (const LayerStats& layer : after_first.layers) {
    ASSERT_EQ(layer.k_scale.size(), 2u);
    for (const float scale : layer.k_scale) EXPECT_NE(scale, 1.0F);
    EXPECT_NE(layer.k_scale[0], layer.k_scale[1]) << "per head";
    EXPECT_EQ(layer.k_saturated, 0) << "a factor of two is left above the prompt's largest";
  }
  EXPECT_EQ(after_first.layers[0].k_values, (100 + 9) * 2 * 32) << "the measuring pass wrote nothing that counts";
  RunOne(engine, {.id = "b", .prompt = RandomTokens(random, 60), .sampling = Greedy(10)});
  EXPECT_EQ(engine.Stats().layers[0].k_scale, after_first.layers[0].k_scale);
  EXPECT_EQ(log.lines.size(), 1u);
  // The same first prompt gives the same scales, however it arrives.
  Engine again(config);
  ColdLogits(again, prompt, 7);
  EXPECT_EQ(again.Stats().layers[1].v_scale, after_first.layers[1].v_scale);
  EXPECT_EQ(RunOne(again, {.id = "a", .prompt = prompt, .sampling = Greedy(10)}).tokens, first.tokens);
}

TEST(Scales, AutoUsesTheCheckpointsDeclaration) {
  TinyShape shape;
  shape.extra = R"(, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme":
      {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true}})";
  const TinyModel declared(shape);
  EXPECT_THROW(Engine{TinyConfig(declared, "auto")}, InputError) << "declared, but the scales are missing";
  EXPECT_NO_THROW(Engine{TinyConfig(declared, "int8")}) << "a cache that needs none must not care";
  EngineConfig plain = TinyConfig(Model(), "auto");
  const Engine engine(plain);
  EXPECT_EQ(engine.Config().kv_cache_dtype, "fp32") << "the checkpoint's own dtype";
}

}  // namespace
}  // namespace kvanta::engine
