// KV scales in a checkpoint's tensors (docs/scales.md).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <optional>

#include "base/dtype.h"
#include "base/quote.h"
#include "kvanta/error.h"
#include "models/kv_scale_names.h"
#include "models/kv_scales.h"
#include "weights/module_names.h"

namespace kvanta::models {
namespace {

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

std::vector<int64_t> WithoutOnes(const std::vector<int64_t>& shape) {
  std::vector<int64_t> sizes;
  std::ranges::copy_if(shape, std::back_inserter(sizes), [](int64_t size) { return size != 1; });
  return sizes;
}

// One value, or one per KV head: [], [1], [kv_heads], [kv_heads, 1, 1] and the like.
std::vector<float> ReadScale(const weights::TensorView& tensor, const std::string& name, int kv_heads) {
  const std::vector<int64_t> sizes = WithoutOnes(tensor.shape);
  const bool one = sizes.empty();
  if (!one && sizes != std::vector<int64_t>{kv_heads}) {
    throw InputError(fmt::format("KV scale {} has shape {}; expected [], [1], [{}] or [{}, 1, 1]", Quote(name),
                                 weights::ShapeText(tensor.shape), kv_heads, kv_heads));
  }
  std::vector<float> scales;
  for (int head = 0; head < kv_heads; ++head) {
    const double value = ReadElement(tensor, one ? 0 : head, name);
    scales.push_back(static_cast<float>(value));
    if (!IsScale(scales.back())) {
      throw InputError(fmt::format("KV scale {} is {}; expected {}{}", Quote(name), value, kScaleRange,
                                   value == -1.0 ? " (-1 marks one that was never calibrated)" : ""));
    }
  }
  return scales;
}

// Elements of a tensor with one value, or one per channel of all KV heads: [kv_heads][head_dim], finite.
std::vector<float> ReadChannels(const weights::TensorView& tensor, const std::string& name, const LayerSpec& layer) {
  const int64_t count = int64_t{layer.kv_heads} * layer.head_dim;
  int64_t size = 1;  // the reader of the file has checked that the product is the byte count
  for (const int64_t each : tensor.shape) size *= each;
  if (size != 1 && size != count) {
    throw InputError(fmt::format("{} has shape {}; expected [1] or [{}, {}]", Quote(name),
                                 weights::ShapeText(tensor.shape), layer.kv_heads, layer.head_dim));
  }
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>(ReadElement(tensor, size == 1 ? 0 : i, name)));
    if (!std::isfinite(values.back())) throw InputError(fmt::format("{} has a value that is not finite", Quote(name)));
  }
  return values;
}

bool IsZero(const weights::TensorView& tensor, const std::string& name) {
  int64_t count = 1;
  for (const int64_t size : tensor.shape) count *= size;
  for (int64_t i = 0; i < count; ++i) {
    if (ReadElement(tensor, i, name) != 0) return false;
  }
  return true;
}

// [kv_heads, head_dim], [1, kv_heads, 1, head_dim] of ModelOpt, or all channels in a row; finite.
std::vector<float> ReadKeyMeans(const weights::TensorView& tensor, const std::string& name, const LayerSpec& layer) {
  const std::vector<int64_t> sizes = WithoutOnes(tensor.shape);
  if (sizes != WithoutOnes({layer.kv_heads, layer.head_dim}) &&
      sizes != std::vector<int64_t>{int64_t{layer.kv_heads} * layer.head_dim}) {
    throw InputError(fmt::format("key means {} have shape {}; expected [{}, {}]", Quote(name),
                                 weights::ShapeText(tensor.shape), layer.kv_heads, layer.head_dim));
  }
  return ReadChannels(tensor, name, layer);
}

// The layer whose attention the checkpoint has in its layer `stored`; config.layers for one without.
int64_t FindStoredLayer(const ModelConfig& config, int64_t stored) {
  if (config.stored_layers == 0) return stored;
  const auto found = std::ranges::find_if(config.layer_specs, [&](const LayerSpec& spec) {
    return !spec.IsRecurrent() && spec.stored_attention == stored;
  });
  return found - config.layer_specs.begin();
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

// Scales of E4M3 per KV head for the range that an INT8 cache's scales and zero points ([kv_heads][head_dim], or empty)
// cover, with the headroom of measured ones.
std::vector<float> ScalesOfInt8(std::span<const float> scales, std::span<const float> offsets, const std::string& name,
                                const LayerSpec& layer) {
  constexpr float kHeadroom = 2, kLargestE4M3 = 448;
  std::vector<float> result(static_cast<size_t>(layer.kv_heads));
  for (size_t i = 0; i < scales.size(); ++i) {
    const float offset = offsets.empty() ? 0 : offsets[i];
    const float largest = scales[i] * std::max(std::abs(-128 - offset), std::abs(127 - offset));
    float& scale = result[i / static_cast<size_t>(layer.head_dim)];
    scale = std::max(scale, largest * kHeadroom / kLargestE4M3);
    if (IsScale(scales[i]) && IsScale(scale)) continue;
    throw InputError(fmt::format("KV scale {} has {}; expected {}", Quote(name), scales[i], kScaleRange));
  }
  return result;
}

// Layer of the decoder that a tensor belongs to; nullopt for other tensors.
std::optional<int64_t> DecoderLayer(std::string_view tensor, std::string_view prefix) {
  // The second ones: producers that name scales after the language model alone.
  for (const std::string_view each :
       {prefix, std::string_view("model."), std::string_view("model.language_model."),
        std::string_view("language_model.model."), std::string_view("transformer."), std::string_view("")}) {
    if (!tensor.starts_with(each)) continue;
    const std::string_view rest = tensor.substr(each.size());
    if (rest.starts_with("layers.")) return weights::LayerOf(rest);
  }
  return std::nullopt;
}

// Reader of one checkpoint's tensors.
class ScaleReader {
 public:
  ScaleReader(const weights::Checkpoint& checkpoint, const ModelConfig& config, const ScaleUse& use)
      : checkpoint_(checkpoint),
        config_(config),
        use_(use),
        prefix_(DecoderNames(config, checkpoint).prefix),
        declared_(DeclaredSides(config)),
        result_{ScaleSource::kNone, UnitScales(config)},
        found_(result_.layers.size()) {}

  KvScales Read() {
    for (const auto& [name, tensor] : checkpoint_.Tensors()) ReadTensor(name, tensor);
    if (!use_.measured) {
      for (const auto& [layer, sides] : int8_) ConvertInt8(layer, sides);
      if (any_) FillLayers();
    }
    return std::move(result_);
  }

 private:
  struct Int8Side {
    std::vector<float> scales, offsets;
    std::string name;
  };

  // nullptr: not known.
  const formats::Side* UsedSide(int64_t layer, size_t side) const {
    if (use_.layers.empty()) return nullptr;
    return side == 0 ? &use_.layers[layer].k : &use_.layers[layer].v;
  }

  // True if the cache depends on the side's scale.
  bool NeedsScale(int64_t layer, size_t side) const {
    const formats::Side* used = UsedSide(layer, side);
    return !use_.measured && (used == nullptr || NeedsStaticScale(*used));
  }

  // Layer of a tensor that is to be read; nullopt for one that the reader of weights would skip, too.
  std::optional<int64_t> FindLayer(const std::string& name, bool has_role) const {
    const std::optional<int64_t> layer = DecoderLayer(name, prefix_);
    if (layer && has_role) {
      const int stored = config_.stored_layers == 0 ? config_.layers : config_.stored_layers;
      if (*layer < stored) return FindStoredLayer(config_, *layer);
      if (*layer < stored + config_.num_nextn_predict_layers) return std::nullopt;
      throw InputError(fmt::format("{}: KV scale {} of layer {}; the model has {}", checkpoint_.Name(), Quote(name),
                                   *layer, stored));
    }
    const bool is_decoder = layer || name.find('.') == name.npos || name.starts_with(prefix_);
    if (!is_decoder || name.starts_with(prefix_ + "mtp_") || !LooksLikeKvScale(name)) return std::nullopt;
    if (!has_role && layer.value_or(0) >= config_.layers) return std::nullopt;
    throw InputError(
        fmt::format("{}: tensor {} looks like a KV scale, but its name is not a known one (docs/scales.md)",
                    checkpoint_.Name(), Quote(name)));
  }

  void ReadTensor(const std::string& name, const weights::TensorView& tensor) {
    const std::optional<ScaleRole> role = RoleOf(name);
    const std::optional<int64_t> found = FindLayer(name, role.has_value());
    // Later layers have no K and V of their own.
    if (!role || !found || *found >= std::ssize(result_.layers)) return;
    const auto layer = static_cast<size_t>(*found);
    const LayerSpec& spec = config_.layer_specs[layer];
    formats::SideScales& k = result_.layers[layer].k;
    switch (*role) {
      case ScaleRole::kIgnored:
        return;
      case ScaleRole::kKeyMean:
        return ReadMean(name, tensor, layer);
      case ScaleRole::kKeyQuery:
        k.query = ReadQueryMatrices(tensor, name, spec);
        return;
      case ScaleRole::kKeyEigen:
        k.eigen = ReadEigenChannels(tensor, name, spec);
        return;
      case ScaleRole::kZero:
        if (use_.measured || IsZero(tensor, name)) return;
        throw InputError(fmt::format("{} is not 0: asymmetric KV quantization is not supported", Quote(name)));
      case ScaleRole::kValueBias:
        if (!NeedsScale(*found, 1) || IsZero(tensor, name)) return;
        throw InputError(
            fmt::format("{} is not 0, so that V's scales are of V without it, which no format stores; "
                        "calculate_kv_scales measures others, a V format without static scales needs "
                        "none (kv_cache_dtype k=fp8+mean,v=int8)",
                        Quote(name)));
      case ScaleRole::kInt8K:
      case ScaleRole::kInt8V: {
        Int8Side& side = int8_[layer][*role == ScaleRole::kInt8V ? 1 : 0];
        side.scales = ReadChannels(tensor, name, spec);
        side.name = name;
        return;
      }
      case ScaleRole::kInt8KOffset:
      case ScaleRole::kInt8VOffset:
        int8_[layer][*role == ScaleRole::kInt8VOffset ? 1 : 0].offsets = ReadChannels(tensor, name, spec);
        return;
      case ScaleRole::kK:
      case ScaleRole::kV:
      case ScaleRole::kBoth:
        break;
    }
    if (use_.measured) return;
    for (const size_t side : {size_t{0}, size_t{1}}) {
      if (*role == (side == 0 ? ScaleRole::kV : ScaleRole::kK)) continue;
      if (declared_[layer][side] == Declared::kNvfp4) continue;
      CheckDeclared(name, *found, side);
      Put(found_[layer][side], name, ReadScale(tensor, name, spec.kv_heads));
      any_ = true;
    }
  }

  // Scales of a format that is not known are measured for other values than any scheme stores.
  void CheckDeclared(const std::string& name, int64_t layer, size_t side) const {
    if (config_.declared_kv_cache_error.empty() || !NeedsScale(layer, side)) return;
    throw InputError(
        fmt::format("{}; so the checkpoint's KV scales ({}) are not those of {}: give others by "
                    "quantization_param_path, measure them by calculate_kv_scales, or choose a kv_cache_dtype without "
                    "static scales, as int8",
                    config_.declared_kv_cache_error, Quote(name),
                    use_.layers.empty() ? "the cache" : UsedSide(layer, side)->format->name));
  }

  void ReadMean(const std::string& name, const weights::TensorView& tensor, size_t layer) {
    formats::SideScales& k = result_.layers[layer].k;
    const bool is_bias = name.ends_with("k_bias");
    const formats::Side* used = UsedSide(static_cast<int64_t>(layer), 0);
    if (is_bias && !(used != nullptr && used->mean) && IsZero(tensor, name)) return;
    k.mean = ReadKeyMeans(tensor, name, config_.layer_specs[layer]);
    if (!is_bias || used == nullptr || !NeedsScale(static_cast<int64_t>(layer), 0)) return;
    if (used->mean) return;
    throw InputError(
        fmt::format("{} is not 0, so that K's scales are of K without it, which +mean stores: give "
                    "kv_cache_dtype k={}+mean,v={}, or measure others by calculate_kv_scales",
                    Quote(name), used->format->name, use_.layers[layer].v.format->name));
  }

  void ConvertInt8(size_t layer, const std::array<Int8Side, 2>& sides) {
    for (size_t side = 0; side < 2; ++side) {
      if (sides[side].scales.empty() || !NeedsScale(static_cast<int64_t>(layer), side)) continue;
      Put(found_[layer][side], sides[side].name,
          ScalesOfInt8(sides[side].scales, sides[side].offsets, sides[side].name, config_.layer_specs[layer]));
      any_ = true;
      result_.note = "the checkpoint's KV scales are of an INT8 cache (kv_cache_scale): converted to E4M3";
    }
  }

  void FillLayers() {
    const bool by_layer = !config_.declared_kv_cache_layers.empty();
    result_.source = ScaleSource::kCheckpoint;
    for (size_t layer = 0; layer < found_.size(); ++layer) {
      for (size_t side = 0; side < 2; ++side) {
        std::vector<float>& scale = found_[layer][side].scale;
        if (!scale.empty()) continue;
        const Declared kind = declared_[layer][side];
        const bool is_declared = kind == Declared::kStatic || (kind == Declared::kNothing && !by_layer);
        const bool is_needed = use_.layers.empty() ? is_declared : NeedsScale(static_cast<int64_t>(layer), side);
        if (is_needed && !config_.layer_specs[layer].IsRecurrent()) {
          throw InputError(fmt::format(
              "{}: it has KV scales, but layer {} has no {} scale; give a file by --quantization-param-path, measure "
              "them by --calculate-kv-scales, or choose a format without static scales by --kv-cache-dtype",
              checkpoint_.Name(), layer, side == 0 ? "K" : "V"));
        }
        scale.assign(static_cast<size_t>(config_.layer_specs[layer].kv_heads), 1.0F);
      }
      result_.layers[layer].k.scale = found_[layer][0].scale;
      result_.layers[layer].v.scale = found_[layer][1].scale;
    }
  }

  const weights::Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const ScaleUse& use_;
  const std::string prefix_;
  const std::vector<std::array<Declared, 2>> declared_;
  KvScales result_;
  std::vector<std::array<Found, 2>> found_;
  std::map<size_t, std::array<Int8Side, 2>> int8_;  // by layer: K, V
  bool any_ = false;
};

}  // namespace

KvScales ReadScaleTensors(const weights::Checkpoint& checkpoint, const ModelConfig& config, const ScaleUse& use) {
  return ScaleReader(checkpoint, config, use).Read();
}

}  // namespace kvanta::models
