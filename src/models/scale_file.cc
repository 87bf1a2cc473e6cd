// The two schemas of --quantization-param-path (docs/scales.md).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "base/json.h"
#include "base/memory_map.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "models/kv_scales.h"
#include "weights/safetensors.h"

namespace kvanta::models {
namespace {

constexpr size_t kMaxJsonBytes = 100'000'000;
constexpr size_t kMaxMatrixBytes = size_t{1} << 30;

// A scale as f32: finite and > 0 after rounding.
float ReadScale(const JsonObject& object, const std::string& key, const Json& value, double factor = 1.0) {
  if (value.is_number()) {
    const auto scale = static_cast<float>(value.get<double>() * factor);
    if (IsScale(scale)) return scale;
  }
  throw InputError(fmt::format("{} is {}; expected {}{}", object.Name(key), Describe(value), kScaleRange,
                               value == -1 ? " (-1 marks a scale that was never calibrated)" : ""));
}

// Throws unless the keys of `object` are exactly "0" to "count - 1".
void CheckIndices(const JsonObject& object, int64_t count, std::string_view what) {
  for (int64_t i = 0; i < count; ++i) {
    if (!object.Has(std::to_string(i))) {
      throw InputError(
          fmt::format("{} is missing; all {} {} must be there", object.Name(std::to_string(i)), count, what));
    }
  }
  for (const auto& [key, value] : object.Value().items()) {
    const bool canonical = !key.empty() && key.size() < 8 && key.find_first_not_of("0123456789") == key.npos &&
                           std::to_string(std::stol(key)) == key && std::stol(key) < count;
    if (!canonical) throw InputError(fmt::format("{} is not one of the {} {}", object.Name(key), count, what));
  }
}

void AllowKeys(const JsonObject& object, std::initializer_list<std::string_view> known) {
  for (const auto& [key, value] : object.Value().items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      throw InputError(fmt::format("{} is not known; known keys: {}", object.Name(key), fmt::join(known, ", ")));
    }
  }
}

// A layer's scales of K and V: one number for both, or [k, v] (SGLang).
std::pair<float, float> ReadBothSides(const JsonObject& layers, const std::string& key, double factor) {
  const Json& value = layers.Get(key);
  if (!value.is_array()) {
    const float scale = ReadScale(layers, key, value, factor);
    return {scale, scale};
  }
  if (value.size() != 2) layers.Fail(key, "a number for K and V, or a list of both");
  return {ReadScale(layers, key, value[0], factor), ReadScale(layers, key, value[1], factor)};
}

// {"model_type": ..., "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"<TP rank>": {"<layer>": float}}}}:
// one factor for K and V, or a list of both, per rank of a tensor-parallel run. Rank r of n held KV heads [r kv_heads /
// n, ...), so its factors become those heads' scales; with more ranks than heads, the ranks that shared a head must
// agree.
KvScales ReadByRank(const JsonObject& root, const ModelConfig& config) {
  AllowKeys(root, {"model_type", "kv_cache"});
  if (root.String("model_type", config.model_type) != config.model_type) {
    root.Fail("model_type", fmt::format("'{}', as the model's config.json says", config.model_type));
  }
  const JsonObject cache = root.Object("kv_cache");
  AllowKeys(cache, {"dtype", "scaling_factor"});
  const std::string dtype = cache.String("dtype");
  if (dtype != "float8_e4m3fn" && dtype != "float8_e4m3fnuz") cache.Fail("dtype", "float8_e4m3fn or float8_e4m3fnuz");
  // A byte of E4M3FNUZ reads as half of its E4M3FN value, which Kvanta stores: the same bytes take half the scale.
  const double factor = dtype == "float8_e4m3fnuz" ? 0.5 : 1.0;
  const JsonObject ranks = cache.Object("scaling_factor");
  const auto count = static_cast<int64_t>(ranks.Value().size());
  const bool divides =
      count > 0 && (count <= config.kv_heads ? config.kv_heads % count == 0 : count % config.kv_heads == 0);
  if (!divides || count > 4096) {
    cache.Fail("scaling_factor",
               fmt::format("a number of ranks that divides the {} KV heads, or a multiple", config.kv_heads));
  }
  CheckIndices(ranks, count, "tensor-parallel ranks");
  KvScales scales{ScaleSource::kFile, UnitScales(config)};
  const int layer_count = config.KvLayers();
  std::vector<std::vector<bool>> set;  // [layers][KV heads]
  for (const formats::LayerScales& layer : scales.layers) set.emplace_back(layer.k.scale.size());
  for (int64_t rank = 0; rank < count; ++rank) {
    const JsonObject layers = ranks.Object(std::to_string(rank));
    CheckIndices(layers, layer_count, "layers");
    for (int layer = 0; layer < layer_count; ++layer) {
      const int64_t heads = config.layer_specs[layer].kv_heads;
      const int64_t first = rank * heads / count;
      const int64_t last = std::max(first + 1, (rank + 1) * heads / count);
      const std::string key = std::to_string(layer);
      const auto [k_scale, v_scale] = ReadBothSides(layers, key, factor);
      for (int64_t head = first; head < last; ++head) {
        float &k = scales.layers[layer].k.scale[head], &v = scales.layers[layer].v.scale[head];
        if (set[layer][head] && (k != k_scale || v != v_scale)) {
          throw InputError(fmt::format("{} is {}, but another rank with the same KV head {} has {}", layers.Name(key),
                                       k != k_scale ? k_scale : v_scale, head, k != k_scale ? k : v));
        }
        set[layer][head] = true;
        k = k_scale;
        v = v_scale;
      }
    }
  }
  return scales;
}

void CheckModel(const JsonObject& root, const ModelConfig& config, std::string_view fingerprint) {
  const JsonObject model = root.Object("model");
  AllowKeys(model, {"architecture", "layers", "kv_heads", "head_dim", "hash"});
  const auto check = [&](const char* key, int64_t expected) {
    if (model.Int(key, 1, std::numeric_limits<int32_t>::max()) != expected) {
      model.Fail(key, fmt::format("{}, as this model has: the file belongs to another", expected));
    }
  };
  if (model.String("architecture", config.architecture) != config.architecture) {
    model.Fail("architecture", fmt::format("'{}': the file belongs to another model", config.architecture));
  }
  check("layers", config.KvLayers());
  check("kv_heads", config.kv_heads);
  check("head_dim", config.head_dim);
  if (!fingerprint.empty() && model.String("hash", fingerprint) != fingerprint) {
    model.Fail("hash", fmt::format("'{}', the hash of these weights: the file belongs to another model", fingerprint));
  }
}

std::vector<float> ReadSide(const JsonObject& layer, const std::string& key, bool per_head, int kv_heads) {
  const Json* value = layer.Find(key);
  if (value == nullptr) layer.Fail(key, per_head ? "one number per KV head" : "a number");
  if (!per_head) return std::vector<float>(kv_heads, ReadScale(layer, key, *value));
  if (!value->is_array() || value->size() != static_cast<size_t>(kv_heads)) {
    layer.Fail(key, fmt::format("a list of {} numbers, one per KV head", kv_heads));
  }
  std::vector<float> scales;
  for (const Json& scale : *value) scales.push_back(ReadScale(layer, key, scale));
  return scales;
}

std::vector<float> ReadMeans(const JsonObject& layer, const LayerSpec& spec) {
  constexpr const char* kKey = "k_mean";
  std::vector<float> means;
  const Json* heads = layer.Find(kKey);
  if (heads == nullptr) return means;
  const std::string expected = fmt::format("{} lists of {} finite numbers", spec.kv_heads, spec.head_dim);
  if (!heads->is_array() || heads->size() != static_cast<size_t>(spec.kv_heads)) layer.Fail(kKey, expected);
  for (const Json& head : *heads) {
    if (!head.is_array() || head.size() != static_cast<size_t>(spec.head_dim)) layer.Fail(kKey, expected);
    for (const Json& mean : head) {
      if (!mean.is_number() || !std::isfinite(static_cast<float>(mean.get<double>()))) layer.Fail(kKey, expected);
      means.push_back(static_cast<float>(mean.get<double>()));
    }
  }
  return means;
}

// Lists of channels, ascending, as many for every head.
std::vector<int> ReadOutliers(const JsonObject& layer, const LayerSpec& spec) {
  constexpr const char* kKey = "k_outliers";
  std::vector<int> channels;
  const Json* heads = layer.Find(kKey);
  if (heads == nullptr) return channels;
  const std::string expected =
      fmt::format("{} lists of equally many channels, ascending, from 0 to {}", spec.kv_heads, spec.head_dim - 1);
  if (!heads->is_array() || heads->size() != static_cast<size_t>(spec.kv_heads)) layer.Fail(kKey, expected);
  for (const Json& head : *heads) {
    if (!head.is_array() || head.empty() || head.size() != (*heads)[0].size()) layer.Fail(kKey, expected);
    int64_t last = -1;
    for (const Json& channel : head) {
      if (!channel.is_number_unsigned() || channel.get<uint64_t>() >= static_cast<uint64_t>(spec.head_dim) ||
          channel.get<int64_t>() <= last) {
        layer.Fail(kKey, expected);
      }
      last = channel.get<int64_t>();
      channels.push_back(static_cast<int>(last));
    }
  }
  return channels;
}

KvScales ReadOwn(const JsonObject& root, const ModelConfig& config, std::string_view fingerprint) {
  AllowKeys(root, {"kvanta_kv_scales", "model", "granularity", "layers", "comment"});
  if (root.Get("kvanta_kv_scales") != 1) root.Fail("kvanta_kv_scales", "1, the version this reader knows");
  CheckModel(root, config, fingerprint);
  const std::string granularity = root.String("granularity");
  if (granularity != "tensor" && granularity != "head") root.Fail("granularity", "\"tensor\" or \"head\"");
  const JsonObject layers = root.Object("layers");
  CheckIndices(layers, config.KvLayers(), "layers");
  KvScales scales{ScaleSource::kFile, UnitScales(config)};
  for (int i = 0; i < config.KvLayers(); ++i) {
    const LayerSpec& spec = config.layer_specs[i];
    const JsonObject layer = layers.Object(std::to_string(i));
    AllowKeys(layer, {"k_scale", "v_scale", "k_mean", "k_outliers"});
    scales.layers[i].k.scale = ReadSide(layer, "k_scale", granularity == "head", spec.kv_heads);
    scales.layers[i].v.scale = ReadSide(layer, "v_scale", granularity == "head", spec.kv_heads);
    scales.layers[i].k.mean = ReadMeans(layer, spec);
    scales.layers[i].k.outliers = ReadOutliers(layer, spec);
  }
  return scales;
}

// Metadata "kvanta_kv_scales": the text of Kvanta's own schema; tensors "layers.N.k_query" of all layers that have K,
// and "layers.N.k_eigen" of all of them or of none.
KvScales ReadSafetensors(std::string_view file, const std::string& name, const ModelConfig& config,
                         std::string_view fingerprint) {
  const std::span<const uint8_t> bytes(reinterpret_cast<const uint8_t*>(file.data()), file.size());
  const weights::TensorMap tensors = weights::ParseSafetensors(bytes, name);
  const std::optional<std::string> text = weights::SafetensorsMetadata(bytes, name, "kvanta_kv_scales");
  if (!text) {
    throw InputError(
        fmt::format("{}: not a scale file: its metadata has no key 'kvanta_kv_scales' (`kvanta calibrate "
                    "--query` writes it)",
                    name));
  }
  const Json value = ParseJson(*text, name);
  KvScales scales = ReadOwn(JsonObject(value, name), config, fingerprint);
  size_t used = 0;
  const bool has_eigen =
      std::ranges::any_of(tensors, [](const auto& tensor) { return tensor.first.ends_with(".k_eigen"); });
  for (int i = 0; i < config.KvLayers(); ++i) {
    const auto layer = static_cast<size_t>(i);
    const std::string query = fmt::format("layers.{}.k_query", i), eigen = fmt::format("layers.{}.k_eigen", i);
    const auto matrices = tensors.find(query), channels = tensors.find(eigen);
    used += (matrices != tensors.end() ? 1 : 0) + (channels != tensors.end() ? 1 : 0);
    if (config.layer_specs[layer].IsRecurrent()) continue;  // a calibration has those of all layers
    if (matrices == tensors.end()) {
      throw InputError(fmt::format("{}: tensor {} is missing; all layers with keys must have theirs", name, query));
    }
    formats::SideScales& k = scales.layers[layer].k;
    if (k.mean.empty()) throw InputError(fmt::format("{}: layer {} has a k_query, but no k_mean", name, i));
    k.query = ReadQueryMatrices(matrices->second, fmt::format("{}: {}", name, query), config.layer_specs[layer]);
    if (!has_eigen) continue;
    if (channels == tensors.end()) {
      throw InputError(fmt::format("{}: tensor {} is missing; all layers have theirs, or none", name, eigen));
    }
    k.eigen = ReadEigenChannels(channels->second, fmt::format("{}: {}", name, eigen), config.layer_specs[layer]);
  }
  if (used != tensors.size()) {
    throw InputError(
        fmt::format("{}: {} tensors; only {} layers.N.k_query and layers.N.k_eigen of this model are known", name,
                    tensors.size(), used));
  }
  return scales;
}

void CheckSize(size_t bytes, size_t max_bytes, const std::string& name) {
  if (bytes > max_bytes) throw InputError(fmt::format("{}: {} bytes; at most {} are read", name, bytes, max_bytes));
}

void CheckEncoding(std::string_view file, const std::string& name) {
  if (!file.starts_with("\xff\xfe") && !file.starts_with("\xfe\xff")) return;
  throw InputError(fmt::format("{}: is encoded in UTF-16; save it in UTF-8", name));
}

// A safetensors file begins with the 8 bytes of a length below 2^56; JSON has no zero bytes.
bool IsSafetensors(std::string_view file) {
  return file.size() >= 8 && file[7] == '\0';
}

}  // namespace

KvScales ParseScaleFile(std::string_view file, const std::string& name, const ModelConfig& config,
                        std::string_view fingerprint) {
  CheckEncoding(file, name);
  if (IsSafetensors(file)) return ReadSafetensors(file, name, config, fingerprint);
  CheckSize(file.size(), kMaxJsonBytes, name);
  const Json value = ParseJson(file, name);
  const JsonObject root(value, name);
  if (value.contains("kvanta_kv_scales")) return ReadOwn(root, config, fingerprint);
  if (value.contains("kv_cache")) return ReadByRank(root, config);
  throw InputError(
      fmt::format("{}: not a scale file: it has neither key 'kv_cache' (scaling_factor by rank and layer) nor "
                  "'kvanta_kv_scales'",
                  name));
}

KvScales ReadScaleFile(const std::string& path, const ModelConfig& config, std::string_view fingerprint) {
  const MemoryMap file(path);
  const auto bytes = file.Bytes();
  CheckSize(bytes.size(), kMaxMatrixBytes, path);
  return ParseScaleFile({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path, config, fingerprint);
}

}  // namespace kvanta::models
