#include "models/kv_scales.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "base/quote.h"
#include "kvanta/error.h"
#include "models/fingerprint.h"

namespace kvanta::models {
namespace {

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

}  // namespace

std::vector<formats::LayerScales> UnitScales(const ModelConfig& config) {
  std::vector<formats::LayerScales> layers(static_cast<size_t>(config.KvLayers()));
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].k.scale.assign(static_cast<size_t>(config.layer_specs[i].kv_heads), 1.0F);
    layers[i].v.scale = layers[i].k.scale;
  }
  return layers;
}

bool IsScale(float scale) noexcept {
  return scale >= std::numeric_limits<float>::min() && 1 / scale >= std::numeric_limits<float>::min();
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
                      const ModelConfig& config, const ScaleUse& use) {
  const std::span<const formats::LayerScheme> used = use.layers;
  const bool from_file = !quantization_param_path.empty();
  KvScales scales = from_file ? ReadScaleFile(quantization_param_path, config, Fingerprint(checkpoint))
                              : ReadScaleTensors(checkpoint, config, use);
  for (size_t layer = 0; layer < used.size(); ++layer) {
    const formats::Format& format = *used[layer].k.format;
    if (!formats::IsAllocated(format.code)) continue;
    formats::SideScales& k = scales.layers[layer].k;
    k.query = nullptr;
    if (k.eigen != nullptr) {
      const LayerSpec& spec = config.layer_specs[layer];
      k.query = MakeKltTransform(*k.eigen, spec.kv_heads, spec.head_dim, format.code_bits, format.scaling.channel_bits);
    } else if (from_file) {
      throw InputError(fmt::format("{}: layer {} has no k_eigen, which {} needs; `kvanta calibrate --query` writes it",
                                   quantization_param_path, layer, format.name));
    }
  }
  return scales;
}

}  // namespace kvanta::models
