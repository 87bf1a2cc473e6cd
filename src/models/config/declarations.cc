#include "models/config/declarations.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "kvanta/error.h"
#include "models/config/token_ids.h"

namespace kvanta::models {
namespace {

// Scheme texts of the layers, as ModelConfig::declared_kv_cache_layers has them; empty without any declaration.
std::vector<std::string> DeclaredLayers(const weights::QuantizationConfig& quantization, const std::string& file,
                                        int layers) {
  if (quantization.kv_cache_layers.empty()) {
    if (quantization.kv_cache.empty()) return {};
    return std::vector(static_cast<size_t>(layers), quantization.kv_cache);
  }
  std::vector<std::string> schemes(static_cast<size_t>(layers));
  for (const auto& [layer, scheme] : quantization.kv_cache_layers) {
    if (layer >= layers) {
      throw InputError(
          fmt::format("{}: kv_cache_quantized_layers has layer {}; the model has {}", file, layer, layers));
    }
    schemes[static_cast<size_t>(layer)] = scheme;
  }
  return schemes;
}

// Sets the schemes that a file declares; throws InputError if they differ from those of another file.
void DeclareCache(const weights::QuantizationConfig& quantization, const std::string& file, ModelConfig& config) {
  if (!quantization.kv_cache_error.empty()) throw InputError(quantization.kv_cache_error);
  const std::vector<std::string> schemes = DeclaredLayers(quantization, file, config.layers);
  if (schemes.empty()) return;
  std::vector<std::string> known = config.declared_kv_cache_layers;
  if (!config.declared_kv_cache.empty()) known.assign(schemes.size(), config.declared_kv_cache);
  if (!known.empty() && known != schemes) {
    const auto differing = std::ranges::mismatch(known, schemes);
    const auto shown = [](const std::string& scheme) { return scheme.empty() ? "no quantized one" : scheme.c_str(); };
    throw InputError(fmt::format("{}: declares a KV cache in {} for layer {}, but config.json {}", file,
                                 shown(*differing.in2), differing.in1 - known.begin(), shown(*differing.in1)));
  }
  if (std::ranges::all_of(schemes, [&](const std::string& scheme) { return scheme == schemes.front(); })) {
    config.declared_kv_cache = schemes.front();
  } else {
    config.declared_kv_cache_layers = schemes;
  }
}

}  // namespace

void Declare(const weights::QuantizationConfig& quantization, const std::string& file, ModelConfig& config) {
  if (config.quantization.method == weights::QuantMethod::kNone) config.quantization = quantization;
  if (!config.declared_kv_cache_error.empty()) return;
  try {
    DeclareCache(quantization, file, config);
  } catch (const InputError& error) {  // an explicit format overrides it
    config.declared_kv_cache.clear();
    config.declared_kv_cache_layers.clear();
    config.declared_kv_cache_error = error.what();
  }
}

void AddGenerationConfig(std::string_view text, const std::string& name, ModelConfig& config) {
  const Json root = ParseConfigJson(text, name);
  AddEosIds(JsonObject(root, name), config);
  const Json* cache = JsonObject(root, name).Find("cache_implementation");
  if (cache == nullptr || *cache != "quantized") return;
  config.kv_cache_note = fmt::format(
      "{}: cache_implementation 'quantized' is a cache of transformers, which no format here equals: kv_cache_dtype "
      "chooses one, as int8 or int4",
      name);
}

void AddHfQuantConfig(std::string_view text, const std::string& name, ModelConfig& config) {
  const Json root = ParseJson(text, name);
  Declare(weights::ReadHfQuantConfig(JsonObject(root, name)), name, config);
}

void AddModelSlimConfig(std::string_view text, const std::string& name, ModelConfig& config) {
  const Json root = ParseJson(text, name);
  const Json* type = JsonObject(root, name).Find("kv_cache_type");
  if (type == nullptr) return;
  weights::QuantizationConfig quantization;
  if (*type == "C8") {
    quantization.kv_cache = "int8";
  } else {
    quantization.kv_cache_error =
        fmt::format("{}: key 'kv_cache_type' is {}; expected C8 (INT8) or null", name, Describe(*type));
  }
  Declare(quantization, name, config);
}

}  // namespace kvanta::models
