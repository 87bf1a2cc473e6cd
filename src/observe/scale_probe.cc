#include "observe/scale_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "formats/transform.h"
#include "kernels/attention/cpu/table.h"
#include "kvanta/error.h"

namespace kvanta::observe {
namespace {

using kernels::kMaxHeadDim;
constexpr float kHeadroom = 2.0F;

// Measures appended keys and values.
class Probe final : public KvObserver {
 public:
  Probe(const formats::CacheLayout& layout, const std::vector<formats::LayerScales>& scales)
      : layout_(layout), scales_(scales), probes_(layout.layers.size()) {
    for (size_t i = 0; i < probes_.size(); ++i) {
      probes_[i].k.amax.assign(static_cast<size_t>(layout.layers[i].kv_heads), 0.0F);
      probes_[i].v.amax = probes_[i].k.amax;
      limits_.push_back({LimitsOf(layout.layers[i].k), LimitsOf(layout.layers[i].v)});
    }
  }

  void OnAppend(int layer, const float* k, const float* v, int64_t stride, int64_t rows) noexcept override {
    const auto at = static_cast<size_t>(layer);
    Measure(layout_.layers[at], layout_.layers[at].k, scales_[at].k, k, stride, rows, limits_[at][0], probes_[at].k);
    Measure(layout_.layers[at], layout_.layers[at].v, scales_[at].v, v, stride, rows, limits_[at][1], probes_[at].v);
  }

  std::vector<LayerProbe> Take() { return std::move(probes_); }

 private:
  struct Limits {
    float largest = std::numeric_limits<float>::infinity();
    float zero = -1;  // the largest magnitude that becomes zero
  };

  static Limits LimitsOf(const formats::Side& side) {
    if (!IsStatic(side)) return {};
    return {.largest = LargestFinite(*side.format), .zero = LargestZero(*side.format)};
  }

  static void Measure(const formats::LayerScheme& layer, const formats::Side& side, const formats::SideScales& scales,
                      const float* x_rows, int64_t stride, int64_t rows, const Limits& limits,
                      SideProbe& probe) noexcept {
    const int head_dim = layer.shape.head_dim;
    float x[kMaxHeadDim], outliers[KvScheme::kMaxOutliers];
    for (int64_t row = 0; row < rows; ++row) {
      for (int head = 0; head < layer.kv_heads; ++head) {
        const float* values = x_rows + row * stride + int64_t{head} * head_dim;
        formats::TransformOf(side, scales, head, head_dim).Forward(values, x, outliers);
        float& amax = probe.amax[static_cast<size_t>(head)];
        const float scale = scales.scale.empty() ? 1.0F : scales.scale[static_cast<size_t>(head)];
        const float largest = limits.largest * scale, zero = limits.zero * scale;
        for (int c = 0; c < side.shape.head_dim; ++c) {
          const float magnitude = std::abs(x[c]);
          probe.finite = probe.finite && std::isfinite(magnitude);
          amax = std::max(amax, magnitude);
          probe.saturated += magnitude > largest ? 1 : 0;
          probe.zeroed += magnitude <= zero && magnitude != 0 ? 1 : 0;
        }
        probe.values += head_dim;
      }
    }
  }

  const formats::CacheLayout& layout_;
  const std::vector<formats::LayerScales>& scales_;
  std::vector<LayerProbe> probes_;
  std::vector<std::array<Limits, 2>> limits_;  // K, V
};

void ApplySide(const SideProbe& probe, const formats::Side& side, size_t layer, const char* name,
               std::vector<float>& scale) {
  if (!IsStatic(side)) return;
  if (!probe.finite) {
    throw InputError(
        fmt::format("cannot calculate KV scales: layer {} has values in {} that are not finite", layer, name));
  }
  const float limit = LargestFinite(*side.format) / kHeadroom;
  scale.resize(probe.amax.size());
  for (size_t head = 0; head < scale.size(); ++head) {
    scale[head] = probe.amax[head] > 0 ? std::max(probe.amax[head] / limit, std::numeric_limits<float>::min()) : 1.0F;
  }
}

// A value as a format stores it at a scale of 1.0, next to equal ones.
float Stored(const formats::Format& format, float value) {
  constexpr int kChannels = 16;
  float x[kChannels];
  std::fill(x, x + kChannels, value);
  formats::RowBuffer buffer;
  const formats::RowSections sections = buffer.Sections();
  formats::EncodeCounts counts;
  format.encode_row(x, kChannels, 1.0F, sections, counts);
  format.decode_row(sections, kChannels, 1.0F, x);
  return x[0];
}

}  // namespace

bool IsStatic(const formats::Side& side) {
  return side.format->scaling.per_head;
}

bool HasStaticScales(const formats::CacheLayout& layout) {
  return std::ranges::any_of(layout.layers, [](const auto& layer) { return IsStatic(layer.k) || IsStatic(layer.v); });
}

float LargestFinite(const formats::Format& format) {
  return Stored(format, std::numeric_limits<float>::infinity());
}

float LargestZero(const formats::Format& format) {
  float x = 1;
  while (Stored(format, x) != 0) x /= 2;
  return x;
}

ScaleFit FitOf(const std::vector<LayerProbe>& probe, const formats::CacheLayout& layout) {
  ScaleFit fit;
  int64_t values = 0, saturated = 0, zeroed = 0;
  for (size_t layer = 0; layer < probe.size(); ++layer) {
    for (const bool is_key : {true, false}) {
      const SideProbe& side = is_key ? probe[layer].k : probe[layer].v;
      if (side.values == 0 || !IsStatic(is_key ? layout.layers[layer].k : layout.layers[layer].v)) continue;
      values += side.values;
      saturated += side.saturated;
      zeroed += side.zeroed;
      const double share = static_cast<double>(side.zeroed) / static_cast<double>(side.values);
      if (share <= fit.max_zeroed) continue;
      fit.max_zeroed = share;
      fit.max_zeroed_side = fmt::format("{} of layer {}", is_key ? "K" : "V", layer);
    }
  }
  if (values == 0) return fit;
  fit.saturated = static_cast<double>(saturated) / static_cast<double>(values);
  fit.zeroed = static_cast<double>(zeroed) / static_cast<double>(values);
  return fit;
}

std::vector<LayerProbe> ProbeKv(models::Model& model, const BackendFactory& make_backend,
                                const formats::CacheLayout& layout, const std::vector<formats::LayerScales>& scales,
                                std::span<const int32_t> tokens, int64_t max_rows) {
  Probe probe(layout, scales);
  ForwardObserved(model, make_backend, layout, tokens, max_rows, probe);
  return probe.Take();
}

void ApplyProbe(const std::vector<LayerProbe>& probe, const formats::CacheLayout& layout,
                std::vector<formats::LayerScales>& scales) {
  for (size_t layer = 0; layer < layout.layers.size(); ++layer) {
    ApplySide(probe[layer].k, layout.layers[layer].k, layer, "K", scales[layer].k.scale);
    ApplySide(probe[layer].v, layout.layers[layer].v, layer, "V", scales[layer].v.scale);
  }
}

std::string StaticLayers(const formats::CacheLayout& layout) {
  std::string text;
  const auto is_static = [&](size_t layer) {
    return layer < layout.layers.size() && (IsStatic(layout.layers[layer].k) || IsStatic(layout.layers[layer].v));
  };
  for (size_t first = 0; first < layout.layers.size(); ++first) {
    if (!is_static(first)) continue;
    size_t last = first;
    while (is_static(last + 1)) ++last;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", first);
    if (last > first) text += fmt::format("-{}", last);
    first = last;
  }
  return text;
}

}  // namespace kvanta::observe
