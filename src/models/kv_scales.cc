#include "models/kv_scales.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

#include "base/dtype.h"
#include "base/json.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "models/fingerprint.h"
#include "weights/module_names.h"

namespace kvanta::models {
namespace {

enum class Role : uint8_t {
  kK,
  kV,
  kBoth,
  kZero,     // zero point or bias of an affine quantizer: must be 0, the formats are symmetric
  kKeyMean,  // with kKeyQuery and kKeyEigen: Kvanta's own, for +query
  kKeyQuery,
  kKeyEigen,
  kIgnored,  // scales of queries and probabilities, which are not cached
};

struct ScaleName {
  std::string_view tail;  // whole components at the end of the tensor's name
  Role role;
};

// Every name under which producers store them (docs/scales.md, "Names in checkpoints").
constexpr std::array kNames = std::to_array<ScaleName>({
    {"kv_scale", Role::kBoth},  // before vLLM 0.6.3
    {"self_attn.k_proj.k_scale", Role::kK},
    {"self_attn.v_proj.v_scale", Role::kV},  // ModelOpt
    {"self_attn.qkv_proj.k_scale", Role::kK},
    {"self_attn.qkv_proj.v_scale", Role::kV},
    {"self_attn.qkqkv_proj.k_scale", Role::kK},
    {"self_attn.qkqkv_proj.v_scale", Role::kV},
    {"self_attn.k_mean", Role::kKeyMean},
    {"self_attn.k_query", Role::kKeyQuery},
    {"self_attn.k_eigen", Role::kKeyEigen},
    {"self_attn.q_scale", Role::kIgnored},
    {"self_attn.k_scale", Role::kK},  // llm-compressor
    {"self_attn.v_scale", Role::kV},
    {"self_attn.attn.q_scale", Role::kIgnored},
    {"self_attn.attn.k_scale", Role::kK},
    {"self_attn.attn.v_scale", Role::kV},
    {"mixer.k_proj.k_scale", Role::kK},
    {"mixer.v_proj.v_scale", Role::kV},
    {"self_attn.q.scale", Role::kIgnored},
    {"self_attn.k_cache.scale", Role::kK},
    {"self_attn.v_cache.scale", Role::kV},
    {"q_proj.output_scale", Role::kIgnored},  // Quark
    {"k_proj.output_scale", Role::kK},
    {"v_proj.output_scale", Role::kV},
    {"self_attn.prob_output_scale", Role::kIgnored},
    {"attention.kv_cache_scaling_factor", Role::kBoth},  // TensorRT-LLM
    {"q_zero_point", Role::kIgnored},
    {"k_zero_point", Role::kZero},
    {"v_zero_point", Role::kZero},
    {"k_proj.k_bias", Role::kZero},
    {"v_proj.v_bias", Role::kZero},
});

const ScaleName* FindName(std::string_view tensor) {
  for (const ScaleName& name : kNames) {
    if (!tensor.ends_with(name.tail)) continue;
    if (tensor.size() == name.tail.size() || tensor[tensor.size() - name.tail.size() - 1] == '.') return &name;
  }
  return nullptr;
}

// True for a last component that can only be a KV scale: under a name outside the table, an error.
bool LooksLikeKvScale(std::string_view tensor) {
  const std::string_view last = tensor.substr(tensor.rfind('.') + 1);
  for (const std::string_view side : {"k_", "v_", "kv_", "key_", "value_"}) {
    for (const std::string_view what :
         {"scale", "scales", "scale_inv", "cache_scale", "scaling_factor", "cache_scaling_factor"}) {
      if (last.size() == side.size() + what.size() && last.starts_with(side) && last.ends_with(what)) return true;
    }
  }
  return false;
}

double ReadElement(const weights::TensorView& tensor, int64_t i, const std::string& name) {
  const uint8_t* data = tensor.data.data();
  const auto load = [&]<class T>(T value) {
    std::memcpy(&value, data + i * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
  };
  if (tensor.dtype == "F32") return load(float{});
  if (tensor.dtype == "F64") return load(double{});
  if (tensor.dtype == "BF16") return Bf16ToFloat(load(uint16_t{}));
  if (tensor.dtype == "F16") return Fp16ToFloat(load(uint16_t{}));
  throw InputError(
      fmt::format("KV scale {} is stored as {}; expected F32, F64, BF16 or F16", Quote(name), tensor.dtype));
}

// One value per KV head from [], [1], [kv_heads] or [kv_heads, 1, 1].
std::vector<double> ReadValues(const weights::TensorView& tensor, const std::string& name, int kv_heads) {
  const auto& shape = tensor.shape;
  const bool one = shape.empty() || (shape.size() == 1 && shape[0] == 1);
  const bool per_head = (shape.size() == 1 && shape[0] == kv_heads) ||
                        (shape.size() == 3 && shape[0] == kv_heads && shape[1] == 1 && shape[2] == 1);
  if (!one && !per_head) {
    throw InputError(fmt::format("KV scale {} has shape {}; expected [], [1], [{}] or [{}, 1, 1]", Quote(name),
                                 weights::ShapeText(shape), kv_heads, kv_heads));
  }
  std::vector<double> values(kv_heads);
  for (int head = 0; head < kv_heads; ++head) values[head] = ReadElement(tensor, one ? 0 : head, name);
  return values;
}

std::vector<float> ReadScale(const weights::TensorView& tensor, const std::string& name, int kv_heads) {
  std::vector<float> scales;
  for (const double value : ReadValues(tensor, name, kv_heads)) {
    const auto scale = static_cast<float>(value);
    if (!std::isfinite(scale) || !(scale > 0)) {
      throw InputError(fmt::format("KV scale {} is {}; expected a finite number above 0{}", Quote(name), value,
                                   value == -1.0 ? " (-1 marks one that was never calibrated)" : ""));
    }
    scales.push_back(scale);
  }
  return scales;
}

void CheckZero(const weights::TensorView& tensor, const std::string& name) {
  int64_t count = 1;  // the reader of the file has checked that the product is the byte count
  for (const int64_t size : tensor.shape) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    if (ReadElement(tensor, i, name) == 0) continue;
    throw InputError(fmt::format("{} is not 0: asymmetric KV quantization is not supported", Quote(name)));
  }
}

// [kv_heads, head_dim], finite.
std::vector<float> ReadKeyMeans(const weights::TensorView& tensor, const std::string& name, const LayerSpec& layer) {
  const int64_t count = int64_t{layer.kv_heads} * layer.head_dim;
  if (tensor.shape != std::vector<int64_t>{layer.kv_heads, layer.head_dim}) {
    throw InputError(fmt::format("key means {} have shape {}; expected [{}, {}]", Quote(name),
                                 weights::ShapeText(tensor.shape), layer.kv_heads, layer.head_dim));
  }
  std::vector<float> means;
  for (int64_t i = 0; i < count; ++i) {
    means.push_back(static_cast<float>(ReadElement(tensor, i, name)));
    if (!std::isfinite(means.back())) throw InputError(fmt::format("key means {} are not finite", Quote(name)));
  }
  return means;
}

// Declaration of the cache of one side of a layer.
enum class Declared : uint8_t {
  kNothing,
  kStatic,  // a format with static scales
  kNvfp4,   // tensors hold amax / (6 * 448), a factor of another format's two-level scale
};

// [layers][K, V]
std::vector<std::array<Declared, 2>> DeclaredSides(const ModelConfig& config) {
  const auto side = [](const std::string& format) { return format == "nvfp4" ? Declared::kNvfp4 : Declared::kStatic; };
  std::vector<std::array<Declared, 2>> sides;
  for (int layer = 0; layer < config.layers; ++layer) {
    const std::string& text =
        config.declared_kv_cache_layers.empty() ? config.declared_kv_cache : config.declared_kv_cache_layers[layer];
    sides.emplace_back();
    if (text.empty()) continue;
    const KvScheme scheme = KvScheme::Parse(text);
    sides.back() = {side(scheme.k.format), side(scheme.v.format)};
  }
  return sides;
}

// True for formats whose codes cover a range only with their static scale. NVFP4's blocks have scales of their own.
bool NeedsStaticScale(const formats::Side& side) {
  return side.format->scaling.per_head && side.format->scaling.block == formats::ScaleType::kNone;
}

std::vector<float> ReadF32(const weights::TensorView& tensor, const std::string& name,
                           const std::vector<int64_t>& shape) {
  if (tensor.dtype != "F32" || tensor.shape != shape) {
    throw InputError(fmt::format("{} is {} {}; expected F32 {}", Quote(name), tensor.dtype,
                                 weights::ShapeText(tensor.shape), weights::ShapeText(shape)));
  }
  std::vector<float> values(tensor.data.size() / sizeof(float));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

struct Found {
  std::vector<float> scale;  // empty: none yet
  std::string name;
};

void Put(Found& found, const std::string& name, const std::vector<float>& scale) {
  if (!found.scale.empty() && found.scale != scale) {
    throw InputError(fmt::format("KV scales {} and {} disagree about the same values", Quote(found.name), Quote(name)));
  }
  found = {scale, name};
}

// The layer whose attention the checkpoint has in its layer `stored`; config.layers for one without.
int64_t FindStoredLayer(const ModelConfig& config, int64_t stored) {
  if (config.stored_layers == 0) return stored;
  const auto found = std::ranges::find_if(config.layer_specs, [&](const LayerSpec& spec) {
    return !spec.IsRecurrent() && spec.stored_attention == stored;
  });
  return found - config.layer_specs.begin();
}

}  // namespace

bool IsKvScaleTensor(std::string_view name) {
  return FindName(name) != nullptr && weights::LayerOf(name).has_value();
}

std::vector<formats::LayerScales> UnitScales(const ModelConfig& config) {
  std::vector<formats::LayerScales> layers(static_cast<size_t>(config.KvLayers()));
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].k.scale.assign(static_cast<size_t>(config.layer_specs[i].kv_heads), 1.0F);
    layers[i].v.scale = layers[i].k.scale;
  }
  return layers;
}

KvScales ReadScaleTensors(const weights::TensorMap& tensors, const std::string& name, const ModelConfig& config,
                          std::span<const formats::LayerScheme> used) {
  KvScales result{ScaleSource::kNone, UnitScales(config)};
  const std::vector<std::array<Declared, 2>> declared = DeclaredSides(config);
  std::vector<std::array<Found, 2>> layers(result.layers.size());
  bool any = false;
  for (const auto& [tensor_name, tensor] : tensors) {
    const ScaleName* known = FindName(tensor_name);
    std::optional<int64_t> layer = weights::LayerOf(tensor_name);
    if (known == nullptr || !layer) {
      if (!LooksLikeKvScale(tensor_name)) continue;
      throw InputError(
          fmt::format("{}: tensor {} looks like a KV scale, but its name is not a known one (docs/scales.md)", name,
                      Quote(tensor_name)));
    }
    if (known->role == Role::kIgnored) continue;
    const int stored = config.stored_layers == 0 ? config.layers : config.stored_layers;
    if (*layer >= stored) {
      throw InputError(
          fmt::format("{}: KV scale {} of layer {}; the model has {}", name, Quote(tensor_name), *layer, stored));
    }
    layer = FindStoredLayer(config, *layer);
    if (*layer >= std::ssize(layers)) continue;  // it has no K and V of its own
    const LayerSpec& spec = config.layer_specs[static_cast<size_t>(*layer)];
    if (known->role == Role::kKeyMean || known->role == Role::kKeyQuery || known->role == Role::kKeyEigen) {
      formats::SideScales& k = result.layers[*layer].k;
      if (known->role == Role::kKeyMean) k.mean = ReadKeyMeans(tensor, tensor_name, spec);
      if (known->role == Role::kKeyQuery) k.query = ReadQueryMatrices(tensor, tensor_name, spec);
      if (known->role == Role::kKeyEigen) k.eigen = ReadEigenChannels(tensor, tensor_name, spec);
      continue;
    }
    if (known->role == Role::kZero) {
      CheckZero(tensor, tensor_name);
      continue;
    }
    for (const size_t side : {size_t{0}, size_t{1}}) {
      if (known->role == (side == 0 ? Role::kV : Role::kK)) continue;
      if (declared[*layer][side] == Declared::kNvfp4) continue;
      Put(layers[*layer][side], tensor_name, ReadScale(tensor, tensor_name, spec.kv_heads));
      any = true;
    }
  }
  const bool by_layer = !config.declared_kv_cache_layers.empty();
  const auto is_static = [](const auto& sides) { return std::ranges::count(sides, Declared::kStatic) != 0; };
  if (!any && std::ranges::none_of(declared, is_static)) return result;
  result.source = ScaleSource::kCheckpoint;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (size_t side = 0; side < 2; ++side) {
      const Declared kind = declared[layer][side];
      const bool is_declared = kind == Declared::kStatic || (kind == Declared::kNothing && !by_layer) ||
                               (!used.empty() && NeedsStaticScale(side == 0 ? used[layer].k : used[layer].v));
      const bool is_needed = is_declared && !config.layer_specs[layer].IsRecurrent();
      if (layers[layer][side].scale.empty()) {
        if (!is_needed) {
          layers[layer][side].scale.assign(static_cast<size_t>(config.layer_specs[layer].kv_heads), 1.0F);
          continue;
        }
        throw InputError(fmt::format(
            "{}: {} but layer {} has no {} scale; give a file by --quantization-param-path, or a format without "
            "static scales by --kv-cache-dtype",
            name, any ? "it has KV scales," : "it declares static KV scales,", layer, side == 0 ? "K" : "V"));
      }
    }
    result.layers[layer].k.scale = layers[layer][0].scale;
    result.layers[layer].v.scale = layers[layer][1].scale;
  }
  return result;
}

std::shared_ptr<const formats::QueryTransform> ReadQueryMatrices(const weights::TensorView& tensor,
                                                                 const std::string& name, const LayerSpec& layer) {
  std::vector<float> matrices = ReadF32(tensor, name, {layer.kv_heads, layer.head_dim, layer.head_dim});
  try {
    return std::make_shared<formats::QueryTransform>(std::move(matrices), layer.kv_heads, layer.head_dim);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", Quote(name), error.what()));
  }
}

std::shared_ptr<const formats::EigenChannels> ReadEigenChannels(const weights::TensorView& tensor,
                                                                const std::string& name, const LayerSpec& layer) {
  const std::vector<float> values = ReadF32(tensor, name, {layer.kv_heads, layer.head_dim + 1, layer.head_dim});
  auto channels = std::make_shared<formats::EigenChannels>(formats::SplitEigenChannels(values, layer.head_dim));
  try {  // a file is good or bad whatever the formats that are used
    for (const int mean_bits : {2, 3}) MakeKltTransform(*channels, layer.kv_heads, layer.head_dim, mean_bits);
  } catch (const InputError& error) {
    throw InputError(fmt::format("{}: {}", Quote(name), error.what()));
  }
  return channels;
}

KvScales LoadKvScales(const std::string& quantization_param_path, const weights::Checkpoint& checkpoint,
                      const ModelConfig& config, std::span<const formats::LayerScheme> used) {
  const bool from_file = !quantization_param_path.empty();
  KvScales scales = from_file ? ReadScaleFile(quantization_param_path, config, Fingerprint(checkpoint))
                              : ReadScaleTensors(checkpoint.Tensors(), checkpoint.Name(), config, used);
  for (size_t layer = 0; layer < used.size(); ++layer) {
    const formats::Format& format = *used[layer].k.format;
    if (!formats::IsAllocated(format.code)) continue;
    formats::SideScales& k = scales.layers[layer].k;
    k.query = nullptr;
    if (k.eigen != nullptr) {
      const LayerSpec& spec = config.layer_specs[layer];
      k.query = MakeKltTransform(*k.eigen, spec.kv_heads, spec.head_dim, format.code_bits);
    } else if (from_file) {
      throw InputError(fmt::format("{}: layer {} has no k_eigen, which {} needs; `kvanta calibrate --query` writes it",
                                   quantization_param_path, layer, format.name));
    }
  }
  return scales;
}

}  // namespace kvanta::models
