// Static scales: given, measured, or missing; the scales that the cache reports.
#include <fmt/format.h>
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
  // The number of zeros depends on how the CPU's kernels round.
  EXPECT_TRUE(log.lines[0].starts_with(
      "no KV scales were given: layers 0-1 use 1.0; 0.0000 % of the values of a probe of 64 tokens saturated, 0."))
      << log.lines[0];
  EXPECT_TRUE(log.lines[0].ends_with(" % became zero")) << log.lines[0];
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
  EXPECT_EQ(log.lines[0].find(" 0.0000 % of the values"), std::string::npos) << log.lines[0];
  EXPECT_NE(log.lines[0].find("; see calculate_kv_scales and quantization_param_path"), std::string::npos);
  std::mt19937_64 random(1);
  ColdLogits(engine, RandomTokens(random, 64));
  EXPECT_GT(engine.Stats().layers[0].k_saturated, 0);
  EXPECT_EQ(engine.Stats().layers[0].v_saturated, 0);
}

TEST(Scales, TheWarningMeasuresUnderflow) {
  Log log;
  TinyShape shape;
  shape.value_gain = 1e-3F;
  const TinyModel quiet(shape);
  EngineConfig config = TinyConfig(quiet, "fp8_e4m3");
  config.on_warning = log.Sink();
  const Engine engine(config);
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find(" of V of layer "), std::string::npos) << log.lines[0];
  EXPECT_NE(log.lines[0].find("; see calculate_kv_scales and quantization_param_path"), std::string::npos);
}

std::string ScaleFile(const weights::TempFolder& folder, float scale) {
  return folder.Write("scales.json", fmt::format(R"({{"kv_cache": {{"dtype": "float8_e4m3fn", "scaling_factor":
      {{"0": {{"0": {0}, "1": {0}}}}}}}}})",
                                                 scale));
}

TEST(Scales, GivenOnesAreProbed) {
  const weights::TempFolder folder;
  for (const auto& [scale, problem] :
       {std::pair(1e-6F, " % of the values of a probe"), std::pair(1e4F, " of layer "), std::pair(0.03F, "")}) {
    Log log;
    EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
    config.quantization_param_path = ScaleFile(folder, scale);
    config.on_warning = log.Sink();
    const Engine engine(config);
    ASSERT_EQ(log.lines.size(), *problem == '\0' ? 0u : 1u) << scale;
    if (log.lines.empty()) continue;
    EXPECT_NE(log.lines[0].find("the KV scales of layers 0-1 do not fit this model"), std::string::npos);
    EXPECT_NE(log.lines[0].find(problem), std::string::npos) << log.lines[0];
  }
}

TEST(Scales, KeysAboveTheRangeOfFp16AreNamedOnce) {
  Log log;
  TinyShape shape;
  shape.key_gain = 1e6F;
  const TinyModel loud(shape);
  EngineConfig config = TinyConfig(loud, "fp16");
  config.on_warning = log.Sink();
  Engine engine(config);
  EXPECT_TRUE(log.lines.empty());
  for (const char* id : {"a", "b"}) RunOne(engine, {.id = id, .prompt = {1, 2, 3}, .sampling = Greedy(2)});
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("values of K of layer 0 were above the largest of fp16"), std::string::npos);
  EXPECT_NE(log.lines[0].find("kv_cache_dtype = bf16 has their range"), std::string::npos) << log.lines[0];
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

TEST(Scales, ACacheFolderThatCannotBeMadeIsAnError) {
  const weights::TempFolder folder;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.calculate_kv_scales = true;
  config.kv_cache_dir = folder.Write("file", "") + "/cache";
  EXPECT_THROW(Engine{config}, InputError);
}

TEST(Scales, MeasuredOnAProbeWhateverTheFirstPromptIs) {
  Log log;
  EngineConfig config = TinyConfig(Model(), "fp8_e4m3");
  config.calculate_kv_scales = true;
  config.on_warning = log.Sink();
  Engine engine(config);
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("layers 0-1 measured on a probe of 128 tokens"), std::string::npos) << log.lines[0];
  const EngineStats at_start = engine.Stats();
  for (const LayerStats& layer : at_start.layers) {
    ASSERT_EQ(layer.k_scale.size(), 2u);
    for (const float scale : layer.k_scale) EXPECT_NE(scale, 1.0F);
    EXPECT_NE(layer.k_scale[0], layer.k_scale[1]) << "per head";
  }
  EXPECT_EQ(at_start.layers[0].k_values, 0) << "the measuring pass wrote nothing that counts";
  std::mt19937_64 random(3);
  const auto prompt = RandomTokens(random, 100);
  const auto first = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(10)});
  EXPECT_EQ(engine.Stats().layers[0].k_scale, at_start.layers[0].k_scale);
  EXPECT_EQ(engine.Stats().layers[0].k_saturated, 0) << "a factor of two is left above the probe's largest";
  EXPECT_EQ(log.lines.size(), 1u);
  // Another first prompt, of one token, as a health probe sends it.
  Engine again(config);
  RunOne(again, {.id = "h", .prompt = {1}, .sampling = Greedy(1)});
  EXPECT_EQ(again.Stats().layers[1].v_scale, at_start.layers[1].v_scale);
  EXPECT_EQ(RunOne(again, {.id = "a", .prompt = prompt, .sampling = Greedy(10)}).tokens, first.tokens);
}

TinyShape Declaring(const std::string& scheme) {
  TinyShape shape;
  shape.extra = R"(, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": )" + scheme + "}";
  return shape;
}

TEST(Scales, AutoUsesTheCheckpointsDeclaration) {
  const TinyModel declared(
      Declaring(R"({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true})"));
  Log log;
  EngineConfig config = TinyConfig(declared, "auto");
  config.on_warning = log.Sink();
  const Engine engine(config);
  EXPECT_EQ(engine.Config().kv_cache_dtype, "fp8_e4m3");
  EXPECT_EQ(engine.Stats().layers[0].k_scale, (std::vector<float>{1, 1})) << "no scale anywhere: as ModelOpt's cast";
  ASSERT_EQ(log.lines.size(), 1u);
  EXPECT_NE(log.lines[0].find("no KV scales were given"), std::string::npos);
  EXPECT_NO_THROW(Engine{TinyConfig(declared, "int8")}) << "a cache that needs none must not care";
  EngineConfig plain = TinyConfig(Model(), "auto");
  const Engine other(plain);
  EXPECT_EQ(other.Config().kv_cache_dtype, "fp32") << "the checkpoint's own dtype";
}

TEST(Scales, AnExplicitFormatBeatsADeclaration) {
  for (const char* scheme : {R"({"num_bits": 8, "type": "float", "dynamic": true})",
                             R"({"num_bits": 8, "type": "int"})", R"({"num_bits": 6, "type": "float"})"}) {
    const TinyModel declared(Declaring(scheme));
    try {
      const Engine engine(TinyConfig(declared, "auto"));
      FAIL() << "auto must not pass over " << scheme;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("kv_cache_dtype = auto follows the checkpoint: choose another"),
                std::string::npos)
          << error.what();
    }
    for (const char* format : {"bf16", "int8", "int4", "fp8"}) {
      EXPECT_NO_THROW(Engine{TinyConfig(declared, format)}) << format << " " << scheme;
      EngineConfig plan = TinyConfig(declared, format);
      EXPECT_NO_THROW(PlanCacheBytes(plan)) << format;
    }
  }
}

}  // namespace
}  // namespace kvanta::engine
