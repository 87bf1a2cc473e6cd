#include "weights/quantization_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/quote.h"
#include "kvanta/error.h"

#include "weights/module_names.h"
#include "weights/quantization_methods.h"

namespace kvanta::weights {
namespace {

struct Method {
  std::string_view name;
  QuantMethod method;
  void (*read)(const JsonObject& quantization, QuantizationConfig& config);
};

// The one list of methods.
constexpr std::array kMethods = std::to_array<Method>({
    {"fp8", QuantMethod::kFp8, ReadFp8Method},
    {"fbgemm_fp8", QuantMethod::kFp8, ReadFp8Method},
    {"compressed-tensors", QuantMethod::kCompressedTensors, ReadCompressedTensorsMethod},
    {"modelopt", QuantMethod::kModelOpt, ReadModelOptMethod},
    {"quark", QuantMethod::kQuark, ReadQuarkMethod},
    {"awq", QuantMethod::kAwq, ReadAwqMethod},
    {"gptq", QuantMethod::kGptq, ReadGptqMethod},
    {"bitsandbytes", QuantMethod::kBitsAndBytes, ReadBitsAndBytesMethod},
    {"mxfp4", QuantMethod::kMxfp4, ReadMxfp4Method},
});

// One of ModelOpt's algorithms, in any case; "" for none.
std::string ReadKvAlgorithm(const JsonObject& object, const char* key) {
  const std::string algorithm = Upper(object.String(key, ""));
  if (algorithm.empty() || algorithm == "NONE") return "";
  if (algorithm == "FP8") return "fp8_e4m3";
  if (algorithm == "NVFP4") return "nvfp4";
  if (algorithm == "FP8_K_NVFP4_V") return "k=fp8_e4m3,v=nvfp4";
  object.Fail(key, "FP8, NVFP4, FP8_K_NVFP4_V or null");
}

// ModelOpt's kv_cache_quant_algo and, by the layers' attention modules, kv_cache_quantized_layers.
void ReadModelOptKvCache(const JsonObject& object, QuantizationConfig& config) {
  constexpr const char *kKey = "kv_cache_quant_algo", *kLayers = "kv_cache_quantized_layers";
  const bool mixed = Upper(object.String(kKey, "")) == "MIXED_PRECISION";
  if (!mixed) config.kv_cache = ReadKvAlgorithm(object, kKey);
  if (!object.Has(kLayers) || object.Get(kLayers).empty()) {
    if (mixed) object.Fail(kKey, "kv_cache_quantized_layers next to it with the algorithm of each layer");
    return;
  }
  const JsonObject layers = object.Object(kLayers);
  for (const auto& [module, value] : layers.Value().items()) {
    const std::optional<int64_t> layer = LayerOf(module);
    if (!layer) layers.Fail(module, "a module of a layer, such as model.layers.0.self_attn");
    const std::string scheme = ReadKvAlgorithm(layers.Object(module), "quant_algo");
    if (scheme.empty()) continue;
    if (config.kv_cache_layers.emplace(*layer, scheme).first->second != scheme) {
      layers.Fail(module, fmt::format("the algorithm that layer {} has by another module ({})", *layer,
                                      config.kv_cache_layers[*layer]));
    }
  }
}

// compressed-tensors' kv_cache_scheme: the arguments of one quantizer.
std::string ReadKvScheme(const JsonObject& quantization) {
  constexpr const char* kKey = "kv_cache_scheme";
  const Json* scheme = quantization.Find(kKey);
  if (scheme == nullptr) return "";
  if (scheme->is_string()) {  // AutoFP8 wrote the word only
    if (*scheme == "static") return "fp8_e4m3";
    return ReadKvAlgorithm(quantization, kKey);  // ModelOpt's name, where compressed-tensors has no description of it
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

std::string ReadQuarkKvCache(const JsonObject& quantization) {
  if (!quantization.Has("kv_cache_quant_config")) return "";
  const JsonObject layers = quantization.Object("kv_cache_quant_config");
  for (const auto& [pattern, value] : layers.Value().items()) {
    const JsonObject output = layers.Object(pattern).Object("output_tensors");
    if (output.String("dtype") != "fp8_e4m3") output.Fail("dtype", "\"fp8_e4m3\"");
    if (output.Bool("is_dynamic", false)) output.Fail("is_dynamic", "false (static scales)");
  }
  return layers.Value().empty() ? "" : "fp8_e4m3";
}

void ReadKvCache(const JsonObject& quantization, QuantizationConfig& config) {
  ReadModelOptKvCache(quantization, config);
  const std::string scheme = ReadKvScheme(quantization);
  if (!scheme.empty() && !config.kv_cache.empty() && scheme != config.kv_cache) {
    quantization.Fail("kv_cache_quant_algo", fmt::format("what kv_cache_scheme declares ({})", scheme));
  }
  if (!scheme.empty()) config.kv_cache = scheme;
}

// Matches the whole text; `*` stands for any characters.
bool MatchesWildcards(std::string_view pattern, std::string_view text) {
  const size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern == text;
  if (!text.starts_with(pattern.substr(0, star))) return false;
  text.remove_prefix(star);
  pattern.remove_prefix(star + 1);
  // The part up to the next star is taken where it occurs first; the last one must end the text.
  for (size_t next = pattern.find('*'); next != pattern.npos; next = pattern.find('*')) {
    const size_t found = text.find(pattern.substr(0, next));
    if (found == text.npos) return false;
    text.remove_prefix(found + next);
    pattern.remove_prefix(next + 1);
  }
  return text.ends_with(pattern);
}

}  // namespace

std::string_view Name(QuantMethod method) noexcept {
  const auto* found = std::ranges::find(kMethods, method, &Method::method);
  return found == kMethods.end() ? std::string_view() : found->name;
}

bool QuantizationConfig::IsIgnored(std::string_view module) const {
  return std::ranges::any_of(ignored, [&](std::string_view pattern) {
    if (pattern.starts_with(kExpressionPrefix)) {
      return MatchesExpression(pattern.substr(kExpressionPrefix.size()), module);
    }
    if (pattern.find('*') != pattern.npos) return MatchesWildcards(pattern, module);
    const size_t at = module.find(pattern);
    if (pattern.empty() || at == module.npos) return false;
    const size_t end = at + pattern.size();
    return (at == 0 || module[at - 1] == '.') && (end == module.size() || module[end] == '.');
  });
}

QuantizationConfig ReadQuantizationConfig(const JsonObject& quantization) {
  constexpr const char* kKey = "quant_method";
  const std::string name = quantization.String(kKey, "");
  const auto* method = std::ranges::find(kMethods, name, &Method::name);
  if (method == kMethods.end()) {
    std::vector<std::string_view> known;
    for (const Method& each : kMethods) known.push_back(each.name);
    quantization.Fail(kKey, fmt::format("one of {}; or use the unquantized checkpoint", fmt::join(known, ", ")));
  }
  QuantizationConfig config;
  config.method = method->method;
  method->read(quantization, config);
  if (config.format.codes == CodeType::kNone && config.method != QuantMethod::kMxfp4 && config.bits == 0) {
    config.method = QuantMethod::kNone;  // only the cache is declared
  }
  if (method->method == QuantMethod::kQuark) {
    config.kv_cache = ReadQuarkKvCache(quantization);
  } else {
    ReadKvCache(quantization, config);
  }
  return config;
}

QuantizationConfig ReadHfQuantConfig(const JsonObject& root) {
  const JsonObject quantization = root.Object("quantization");
  QuantizationConfig config;
  ReadModelOptMethod(quantization, config);
  if (config.format.codes != CodeType::kNone) config.method = QuantMethod::kModelOpt;
  ReadModelOptKvCache(quantization, config);
  return config;
}

}  // namespace kvanta::weights
