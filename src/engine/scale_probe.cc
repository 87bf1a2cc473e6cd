#include "engine/scale_probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache/sequence_cache.h"
#include "formats/transform.h"
#include "kernels/cpu/attention_table.h"
#include "kvanta/error.h"
#include "runner/runner.h"

namespace kvanta::engine {
namespace {

using kernels::kMaxHeadDim;
constexpr float kHeadroom = 2.0F;

// Passes everything on to a real backend and looks at what is appended.
class ProbingBackend final : public attention::Backend {
 public:
  ProbingBackend(std::unique_ptr<attention::Backend> inner, const formats::CacheLayout& layout,
                 const std::vector<formats::LayerScales>& scales)
      : inner_(std::move(inner)), layout_(layout), scales_(scales), probes_(layout.layers.size()) {
    for (size_t i = 0; i < probes_.size(); ++i) {
      probes_[i].k.amax.assign(static_cast<size_t>(layout.layers[i].kv_heads), 0.0F);
      probes_[i].v.amax = probes_[i].k.amax;
      limits_.emplace_back(Limit(layout.layers[i].k), Limit(layout.layers[i].v));
    }
  }

  attention::BackendInfo Info() const override { return inner_->Info(); }
  std::unique_ptr<attention::Plan> MakePlan(const attention::BatchShape& batch,
                                            std::unique_ptr<attention::Plan> plan) override {
    rows_ = 0;
    for (const attention::SequenceSpan& span : batch.sequences) rows_ += span.tokens;
    return inner_->MakePlan(batch, std::move(plan));
  }
  void Append(attention::Plan& plan, int layer, const float* k, const float* v, int64_t kv_stride) noexcept override {
    const auto at = static_cast<size_t>(layer);
    Look(layout_.layers[at], layout_.layers[at].k, scales_[at].k, k, kv_stride, limits_[at].first, probes_[at].k);
    Look(layout_.layers[at], layout_.layers[at].v, scales_[at].v, v, kv_stride, limits_[at].second, probes_[at].v);
    inner_->Append(plan, layer, k, v, kv_stride);
  }
  void Run(attention::Plan& plan, int layer, const float* q, int64_t q_stride, float* out) noexcept override {
    inner_->Run(plan, layer, q, q_stride, out);
  }
  attention::AppendCounts Counts(int layer) const override { return inner_->Counts(layer); }
  const formats::LayerScales& Scales(int layer) const override { return inner_->Scales(layer); }

  std::vector<LayerProbe> Probes() { return std::move(probes_); }

 private:
  static float Limit(const formats::Side& side) {
    return IsStatic(side) ? LargestFinite(*side.format) : std::numeric_limits<float>::infinity();
  }

  void Look(const formats::LayerScheme& layer, const formats::Side& side, const formats::SideScales& scales,
            const float* rows, int64_t stride, float limit, SideProbe& probe) const noexcept {
    const int head_dim = layer.shape.head_dim;
    float x[kMaxHeadDim];
    for (int64_t row = 0; row < rows_; ++row) {
      for (int head = 0; head < layer.kv_heads; ++head) {
        const float* values = rows + row * stride + int64_t{head} * head_dim;
        const float* mean = side.mean ? scales.mean.data() + int64_t{head} * head_dim : nullptr;
        for (int c = 0; c < head_dim; ++c) x[c] = mean != nullptr ? values[c] - mean[c] : values[c];
        if (side.hadamard) formats::Hadamard(x, head_dim);
        float& amax = probe.amax[static_cast<size_t>(head)];
        for (int c = 0; c < head_dim; ++c) {
          const float magnitude = std::abs(x[c]);
          probe.finite = probe.finite && std::isfinite(magnitude);
          amax = std::max(amax, magnitude);
          probe.above_unit += magnitude > limit ? 1 : 0;
        }
        probe.values += head_dim;
      }
    }
  }

  std::unique_ptr<attention::Backend> inner_;
  const formats::CacheLayout& layout_;
  const std::vector<formats::LayerScales>& scales_;
  std::vector<LayerProbe> probes_;
  std::vector<std::pair<float, float>> limits_;  // K, V
  int64_t rows_ = 0;
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
    scale[head] = probe.amax[head] > 0 ? probe.amax[head] / limit : 1.0F;
  }
}

}  // namespace

bool IsStatic(const formats::Side& side) {
  return side.format->scaling.per_head;
}

bool HasStaticScales(const formats::CacheLayout& layout) {
  return std::ranges::any_of(layout.layers, [](const auto& layer) { return IsStatic(layer.k) || IsStatic(layer.v); });
}

float LargestFinite(const formats::Format& format) {
  constexpr int kChannels = 16;
  float x[kChannels];
  std::fill(x, x + kChannels, std::numeric_limits<float>::infinity());
  formats::RowBuffer buffer;
  const formats::RowPlanes planes = buffer.Planes();
  formats::EncodeCounts counts;
  format.encode_row(x, kChannels, 1.0F, planes, counts);
  format.decode_row(planes, kChannels, 1.0F, x);
  return x[0];
}

std::vector<LayerProbe> ProbeKv(models::Model& model, const BackendFactory& make_backend,
                                const formats::CacheLayout& layout, const std::vector<formats::LayerScales>& scales,
                                std::span<const int32_t> tokens, int64_t max_rows) {
  tokens = tokens.first(std::min(tokens.size(), static_cast<size_t>(kMostProbedTokens)));
  const std::vector<KvScheme> schemes(layout.layers.size(), KvScheme::Parse("bf16"));
  std::vector<formats::LayerShape> shapes;
  for (const auto& layer : layout.layers) shapes.push_back({layer.kv_heads, layer.shape.head_dim});
  const formats::CacheLayout plain = formats::PlanCache(schemes, shapes, layout.page_size);
  const cache::PageDemand demand(plain);
  const auto count = static_cast<int64_t>(tokens.size());
  cache::PageStore store(Cpu(), plain, {.budget_bytes = demand.PeakBytes(count), .poison_unused = false});
  cache::SequenceCache pages(store, nullptr, demand, "");
  ProbingBackend backend(make_backend(store, {.layers = model.AttentionLayers(), .scales = {}}), layout, scales);
  runner::Runner runner(model, max_rows, 1);
  while (pages.Length() < count) {
    const int64_t rows = std::min(max_rows, count - pages.Length());
    pages.Reserve(rows);
    const runner::RunItem item{.tokens = tokens.subspan(static_cast<size_t>(pages.Length()), static_cast<size_t>(rows)),
                               .start = pages.Length(),
                               .pages = pages.Pages()};
    runner.Forward({&item, 1}, backend);
    pages.Commit(tokens);
  }
  return backend.Probes();
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

}  // namespace kvanta::engine
