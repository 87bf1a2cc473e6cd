#include "models/quantization_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/quote.h"
#include "kvanta/error.h"

namespace kvanta::models {
namespace {

[[noreturn]] void RefuseWeights(const JsonObject& where, std::string_view key, std::string_view what) {
  throw InputError(
      fmt::format("{}: the weights are quantized ({}), which is not supported; use the unquantized "
                  "checkpoint (the KV cache is quantized at run time)",
                  where.Name(key), what));
}

std::string Upper(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

// ModelOpt's kv_cache_quant_algo.
std::string ReadKvAlgorithm(const JsonObject& object) {
  constexpr const char* kKey = "kv_cache_quant_algo";
  const std::string algorithm = Upper(object.String(kKey, ""));
  if (algorithm.empty() || algorithm == "NONE") return "";
  if (algorithm == "FP8") return "fp8_e4m3";
  if (algorithm == "NVFP4") return "nvfp4";
  object.Fail(kKey, "FP8, NVFP4 or null");
}

// compressed-tensors' kv_cache_scheme: the arguments of one quantizer.
std::string ReadKvScheme(const JsonObject& quantization) {
  constexpr const char* kKey = "kv_cache_scheme";
  const Json* scheme = quantization.Find(kKey);
  if (scheme == nullptr) return "";
  if (scheme->is_string()) {  // AutoFP8 wrote the word only
    if (*scheme == "static") return "fp8_e4m3";
    quantization.Fail(kKey, "\"static\" or an object");
  }
  const JsonObject arguments = quantization.Object(kKey);
  if (arguments.Bool("dynamic", false)) {
    arguments.Fail("dynamic", "false (static scales); choose a format with dynamic scales by --kv-cache-dtype");
  }
  if (!arguments.Bool("symmetric", true)) arguments.Fail("symmetric", "true");
  if (arguments.String("type") != "float") arguments.Fail("type", "\"float\"");
  const int64_t bits = arguments.Int("num_bits", 4, 8);
  if (bits == 4) return "nvfp4";
  if (bits != 8) arguments.Fail("num_bits", "8 (FP8) or 4 (NVFP4)");
  const std::string strategy = arguments.String("strategy", "tensor");
  if (strategy != "tensor" && strategy != "attn_head") arguments.Fail("strategy", "\"tensor\" or \"attn_head\"");
  return "fp8_e4m3";
}

void RefuseQuantizedGroups(const JsonObject& quantization) {
  constexpr const char* kKey = "config_groups";
  if (!quantization.Has(kKey)) return;
  const JsonObject groups = quantization.Object(kKey);
  for (const auto& [name, value] : groups.Value().items()) {
    if (value.is_null()) continue;
    const JsonObject group = groups.Object(name);
    if (group.Has("weights")) RefuseWeights(group, "weights", "compressed-tensors");
  }
}

std::string ReadQuark(const JsonObject& quantization) {
  if (quantization.Has("global_quant_config") && quantization.Object("global_quant_config").Has("weight")) {
    RefuseWeights(quantization, "global_quant_config.weight", "Quark");
  }
  if (quantization.Has("layer_quant_config") && !quantization.Get("layer_quant_config").empty()) {
    RefuseWeights(quantization, "layer_quant_config", "Quark");
  }
  if (!quantization.Has("kv_cache_quant_config")) return "";
  const JsonObject layers = quantization.Object("kv_cache_quant_config");
  for (const auto& [pattern, value] : layers.Value().items()) {
    const JsonObject output = layers.Object(pattern).Object("output_tensors");
    if (output.String("dtype") != "fp8_e4m3") output.Fail("dtype", "\"fp8_e4m3\"");
    if (output.Bool("is_dynamic", false)) output.Fail("is_dynamic", "false (static scales)");
  }
  return layers.Value().empty() ? "" : "fp8_e4m3";
}

}  // namespace

std::string ReadQuantizationConfig(const JsonObject& quantization) {
  const std::string method = quantization.String("quant_method", "");
  if (method == "quark") return ReadQuark(quantization);
  if (method == "mxfp4") return "";  // experts, read as they are (mxfp4_weights.h)
  if (method != "compressed-tensors" && method != "modelopt") {
    RefuseWeights(quantization, "quant_method", method.empty() ? "no method named" : Quote(method));
  }
  RefuseQuantizedGroups(quantization);
  const std::string weights = Upper(quantization.String("quant_algo", ""));
  if (!weights.empty() && weights != "NONE") RefuseWeights(quantization, "quant_algo", Quote(weights));
  const std::string scheme = ReadKvScheme(quantization);
  const std::string algorithm = ReadKvAlgorithm(quantization);
  if (!scheme.empty() && !algorithm.empty() && scheme != algorithm) {
    quantization.Fail("kv_cache_quant_algo", fmt::format("what kv_cache_scheme declares ({})", scheme));
  }
  return scheme.empty() ? algorithm : scheme;
}

std::string ReadHfQuantConfig(const JsonObject& root) {
  const JsonObject quantization = root.Object("quantization");
  const std::string weights = Upper(quantization.String("quant_algo", ""));
  if (!weights.empty() && weights != "NONE") RefuseWeights(quantization, "quant_algo", Quote(weights));
  return ReadKvAlgorithm(quantization);
}

}  // namespace kvanta::models
