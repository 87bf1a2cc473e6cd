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
    {"awq_marlin", QuantMethod::kAwq, ReadAwqMethod},  // names of vLLM's kernels: the tensors are the same
    {"gptq_marlin", QuantMethod::kGptq, ReadGptqMethod},
    {"auto-round", QuantMethod::kGptq, ReadAutoRoundMethod},
    {"intel/auto-round", QuantMethod::kGptq, ReadAutoRoundMethod},
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
  if (algorithm == "FP8_AFFINE") return "k=fp8_e4m3+mean,v=fp8_e4m3";  // K's bias is a mean of each channel
  if (algorithm == "NVFP4_AFFINE") return "k=nvfp4+mean,v=nvfp4";
  object.Fail(key, "FP8, NVFP4, FP8_K_NVFP4_V, FP8_AFFINE, NVFP4_AFFINE or null");
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

// The scheme of compressed-tensors' arguments of one quantizer.
std::string ReadQuantizer(const JsonObject& arguments) {
  const Json* dynamic = arguments.Find("dynamic");
  if (dynamic != nullptr && *dynamic != false && *dynamic != "local") arguments.Fail("dynamic", "false");
  if (!arguments.Bool("symmetric", true)) arguments.Fail("symmetric", "true");
  if (arguments.String("type") != "float") arguments.Fail("type", "\"float\"");
  const int64_t bits = arguments.Int("num_bits", 4, 8);
  if (bits == 4) return "nvfp4";  // its blocks' scales are dynamic ("local")
  if (bits != 8) arguments.Fail("num_bits", "8 (FP8) or 4 (NVFP4)");
  if (dynamic != nullptr && *dynamic != false) arguments.Fail("dynamic", "false (static scales)");
  const std::string strategy = arguments.String("strategy", "tensor");
  if (strategy != "tensor" && strategy != "attn_head") arguments.Fail("strategy", "\"tensor\" or \"attn_head\"");
  return "fp8_e4m3";
}

// compressed-tensors' kv_cache_scheme.
std::string ReadKvScheme(const JsonObject& quantization) {
  constexpr const char* kKey = "kv_cache_scheme";
  const Json* scheme = quantization.Find(kKey);
  if (scheme == nullptr) return "";
  if (scheme->is_string()) {  // AutoFP8 wrote the word only
    if (*scheme == "static") return "fp8_e4m3";
    return ReadKvAlgorithm(quantization, kKey);  // ModelOpt's name, where compressed-tensors has no description of it
  }
  return ReadQuantizer(quantization.Object(kKey));
}

bool HasTarget(const JsonObject& group, bool (*matches)(std::string_view target)) {
  const Json* targets = group.Find("targets");
  if (targets == nullptr || !targets->is_array()) return false;
  return std::ranges::any_of(*targets, [&](const Json& target) {
    return target.is_string() && matches(target.get_ref<const std::string&>());
  });
}

bool IsAttention(std::string_view target) {
  return target.find("Attention") != target.npos || target.ends_with("attn") || target.ends_with("attn$");
}

bool IsKeysOrValues(std::string_view target) {
  return target.find("k_proj") != target.npos || target.find("v_proj") != target.npos;
}

// Groups of compressed-tensors whose quantizers are of keys and values: attention's inputs, or the outputs of k_proj
// and v_proj.
std::string ReadAttentionGroups(const JsonObject& quantization) {
  constexpr const char *kGroups = "config_groups", *kInputs = "input_activations", *kOutputs = "output_activations";
  std::string found;
  if (!quantization.Has(kGroups) || !quantization.Get(kGroups).is_object()) return found;
  const JsonObject groups = quantization.Object(kGroups);
  for (const auto& [name, value] : groups.Value().items()) {
    if (!value.is_object()) continue;
    const JsonObject group = groups.Object(name);
    const char* key = nullptr;
    if (!group.Has("weights") && group.Has(kInputs) && HasTarget(group, IsAttention)) key = kInputs;
    if (group.Has(kOutputs) && HasTarget(group, IsKeysOrValues)) key = kOutputs;
    if (key == nullptr) continue;
    const std::string scheme = ReadQuantizer(group.Object(key));
    if (!found.empty() && found != scheme) group.Fail(key, fmt::format("what another group declares ({})", found));
    found = scheme;
  }
  return found;
}

// Quark's arguments of the outputs of k_proj and v_proj.
std::string ReadQuarkOutputs(const JsonObject& module) {
  const JsonObject output = module.Object("output_tensors");
  if (output.String("dtype") != "fp8_e4m3") output.Fail("dtype", "\"fp8_e4m3\"");
  if (output.Bool("is_dynamic", false)) output.Fail("is_dynamic", "false (static scales)");
  return "fp8_e4m3";
}

// Modules by patterns in kv_cache_quant_config, or in layer_quant_config where "export" names them.
std::string ReadQuarkKvCache(const JsonObject& quantization) {
  constexpr const char *kCache = "kv_cache_quant_config", *kLayers = "layer_quant_config", *kGroup = "kv_cache_group";
  std::string scheme;
  if (quantization.Has(kCache)) {
    const JsonObject modules = quantization.Object(kCache);
    for (const auto& [pattern, value] : modules.Value().items()) scheme = ReadQuarkOutputs(modules.Object(pattern));
  }
  if (!quantization.Has("export") || !quantization.Get("export").is_object()) return scheme;
  const JsonObject exported = quantization.Object("export");
  if (!exported.Has(kGroup) || exported.Get(kGroup).empty()) return scheme;
  if (!exported.Get(kGroup).is_array()) exported.Fail(kGroup, "a list of patterns of modules");
  for (const Json& pattern : exported.Get(kGroup)) {
    if (!pattern.is_string()) exported.Fail(kGroup, "a list of patterns of modules");
    scheme = ReadQuarkOutputs(quantization.Object(kLayers).Object(pattern.get<std::string>()));
  }
  return scheme;
}

// auto-round's key, next to another method's.
std::string ReadStaticKvDtype(const JsonObject& quantization) {
  constexpr const char* kKey = "static_kv_dtype";
  const std::string dtype = quantization.String(kKey, "");
  if (dtype.empty() || dtype == "auto" || dtype == "float16" || dtype == "bfloat16") return "";
  if (dtype == "fp8" || dtype == "float8_e4m3fn") return "fp8_e4m3";
  quantization.Fail(kKey, "\"fp8\", \"float8_e4m3fn\" or null");
}

void ReadKvCache(const JsonObject& quantization, QuantizationConfig& config) {
  ReadModelOptKvCache(quantization, config);
  const bool is_quark = quantization.String("quant_method", "") == Name(QuantMethod::kQuark);
  const std::pair<const char*, std::string> others[] = {
      {"kv_cache_scheme", ReadKvScheme(quantization)},
      {"config_groups", ReadAttentionGroups(quantization)},
      {"kv_cache_quant_config", is_quark ? ReadQuarkKvCache(quantization) : ""},
      {"static_kv_dtype", ReadStaticKvDtype(quantization)},
  };
  for (const auto& [key, scheme] : others) {
    if (scheme.empty()) continue;
    if (!config.kv_cache.empty() && scheme != config.kv_cache) {
      quantization.Fail(key, fmt::format("the cache that another key declares ({}), not {}", config.kv_cache, scheme));
    }
    config.kv_cache = scheme;
  }
}

// Runs `read`, whose error is about the cache alone.
template <class Read>
void ReadDeclaredCache(QuantizationConfig& config, const Read& read) {
  try {
    read();
  } catch (const InputError& error) {
    config.kv_cache.clear();
    config.kv_cache_layers.clear();
    config.kv_cache_error = error.what();
  }
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
  // Early releases of ModelOpt have the content of hf_quant_config.json here.
  constexpr const char* kNested = "quantization";
  const bool nested = config.method == QuantMethod::kModelOpt && quantization.Has(kNested);
  const JsonObject settings = nested ? quantization.Object(kNested) : quantization;
  method->read(settings, config);
  if (config.format.codes == CodeType::kNone && config.method != QuantMethod::kMxfp4 && config.bits == 0) {
    config.method = QuantMethod::kNone;  // only the cache is declared
  }
  ReadDeclaredCache(config, [&] { ReadKvCache(settings, config); });
  return config;
}

QuantizationConfig ReadHfQuantConfig(const JsonObject& root) {
  const JsonObject quantization = root.Object("quantization");
  QuantizationConfig config;
  ReadModelOptMethod(quantization, config);
  if (config.format.codes != CodeType::kNone) config.method = QuantMethod::kModelOpt;
  ReadDeclaredCache(config, [&] { ReadModelOptKvCache(quantization, config); });
  return config;
}

}  // namespace kvanta::weights
