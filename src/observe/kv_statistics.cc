#include "observe/kv_statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "kvanta/error.h"

namespace kvanta::observe {
namespace {

constexpr int kMantissaBits = 23, kExponentBias = 127, kBinBits = 6;
static_assert(1 << kBinBits == kBinsPerOctave);
// Exponent and leading bits of the mantissa, from the float's own bits: no logarithm, the same on every machine.
constexpr int kFirstBin = (kLowestExponent + kExponentBias) << kBinBits;

class Collector final : public KvObserver {
 public:
  Collector(KvStatistics& out, std::span<const models::LayerSpec> layers, std::span<const float> key_means)
      : out_(out), layers_(layers), key_means_(key_means) {}

  void OnAppend(int layer, const float* k, const float* v, int64_t stride, int64_t rows) noexcept override {
    const models::LayerSpec& spec = layers_[static_cast<size_t>(layer)];
    for (int side = 0; side < 2; ++side) {
      for (int head = 0; head < spec.kv_heads; ++head) {
        AddHead(layer, side, head, spec.head_dim, (side == 0 ? k : v) + int64_t{head} * spec.head_dim, stride, rows);
      }
    }
  }

  int BadLayer() const noexcept { return bad_layer_; }  // the first layer with a value that is not finite, or -1

 private:
  void AddHead(int layer, int side, int head, int head_dim, const float* x, int64_t stride, int64_t rows) noexcept {
    const int64_t index = (int64_t{layer} * 2 + side) * out_.kv_heads + head;
    int64_t* histogram = out_.histogram.data() + index * kMagnitudeBins;
    float* amax = out_.amax.data() + index * out_.head_dim;
    double* sum = out_.sum.data() + index * out_.head_dim;
    double* square_sum = out_.square_sum.data() + index * out_.head_dim;
    const float* mean = nullptr;
    if (side == 0 && !key_means_.empty()) {
      mean = key_means_.data() + (int64_t{layer} * out_.kv_heads + head) * out_.head_dim;
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < head_dim; ++c) {
        const float value = x[row * stride + c] - (mean == nullptr ? 0.0F : mean[c]);
        const float magnitude = std::abs(value);
        if (!std::isfinite(magnitude)) {
          if (bad_layer_ < 0) bad_layer_ = layer;
          continue;
        }
        ++histogram[MagnitudeBin(magnitude)];
        amax[c] = std::max(amax[c], magnitude);
        sum[c] += value;
        square_sum[c] += double{value} * value;
      }
    }
  }

  KvStatistics& out_;
  std::span<const models::LayerSpec> layers_;
  std::span<const float> key_means_;
  int bad_layer_ = -1;
};

}  // namespace

int MagnitudeBin(float magnitude) noexcept {
  const auto bits = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> (kMantissaBits - kBinBits));
  return std::clamp(bits - kFirstBin, 0, kMagnitudeBins - 1);
}

float MagnitudeEdge(int bin) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(bin + kFirstBin) << (kMantissaBits - kBinBits));
}

KvStatistics CollectKvStatistics(models::Model& model, const BackendFactory& make_backend,
                                 const formats::CacheLayout& layout, std::span<const int32_t> tokens,
                                 std::span<const float> key_means, int64_t max_rows) {
  const models::ModelConfig& config = model.Config();
  if (config.UsesMla()) {
    throw InputError(
        fmt::format("{} stores latents (MLA), whose formats have no scales to calibrate; statistics are of "
                    "keys and values",
                    config.architecture));
  }
  KvStatistics result;
  result.tokens = static_cast<int64_t>(tokens.size());
  result.layers = config.KvLayers();
  const std::span<const models::LayerSpec> layers = config.LayersWithKv();
  for (const models::LayerSpec& layer : layers) {
    result.kv_heads = std::max(result.kv_heads, layer.kv_heads);
    result.head_dim = std::max(result.head_dim, layer.head_dim);
  }
  const auto heads = static_cast<size_t>(result.layers) * 2 * static_cast<size_t>(result.kv_heads);
  const size_t channels = heads * static_cast<size_t>(result.head_dim);
  if (!key_means.empty() && key_means.size() != channels / 2) {
    throw InputError(fmt::format("{} key means; the model has {} layers x {} KV heads x {} channels = {}",
                                 key_means.size(), result.layers, result.kv_heads, result.head_dim, channels / 2));
  }
  for (int bin = 0; bin <= kMagnitudeBins; ++bin) result.edges.push_back(MagnitudeEdge(bin));
  result.histogram.assign(heads * kMagnitudeBins, 0);
  result.amax.assign(channels, 0.0F);
  result.sum.assign(channels, 0.0);
  result.square_sum.assign(channels, 0.0);
  Collector collector(result, layers, key_means);
  ForwardObserved(model, make_backend, layout, tokens, max_rows, collector);
  if (collector.BadLayer() >= 0) {
    throw InputError(
        fmt::format("cannot calibrate: layer {} has keys or values that are not finite", collector.BadLayer()));
  }
  return result;
}

}  // namespace kvanta::observe
