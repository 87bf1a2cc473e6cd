// Static scales of the engine's cache: measured by a probe, or checked by one.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "engine/engine_impl.h"

namespace kvanta {
namespace {

constexpr int64_t kMeasuredTokens = 512, kCheckedTokens = 64;

// Tokens whose keys and values cover the range of a text's: the one that begins texts, those that end them, and random
// ones. They depend on the model alone, so that its scales do, too.
std::vector<int32_t> ProbeTokens(const models::ModelConfig& model, int64_t count) {
  std::vector<int32_t> tokens;
  if (model.bos_token_id >= 0) tokens.push_back(model.bos_token_id);
  tokens.insert(tokens.end(), model.eos_token_ids.begin(), model.eos_token_ids.end());
  std::mt19937 random(1);
  const auto size = static_cast<size_t>(count);
  while (tokens.size() < size) tokens.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(model.vocab)));
  tokens.resize(size);
  return tokens;
}

}  // namespace

std::vector<observe::LayerProbe> Engine::Impl::ProbeScales(int64_t tokens) {
  return observe::ProbeKv(*components_.model, components_.make_backend, components_.layout, components_.scales,
                          ProbeTokens(components_.model->Config(), tokens), components_.config.max_num_batched_tokens);
}

void Engine::Impl::CheckScales() {
  const bool given = components_.scales_given;
  const std::string layers = observe::StaticLayers(components_.layout);
  if (!components_.ranks->IsSingleRank()) {  // other ranks would have to take part in a probe
    if (given) return;
    return Warn(fmt::format("no KV scales were given: layers {} use 1.0; see quantization_param_path", layers));
  }
  if (given && std::ranges::any_of(components_.layout.layers, [](const formats::LayerScheme& layer) {
        return (observe::IsStatic(layer.k) && layer.k.hadamard) || (observe::IsStatic(layer.v) && layer.v.hadamard);
      })) {
    Warn("the given KV scales are of values without +hadamard, which the cache stores: see calculate_kv_scales");
  }
  const int64_t tokens = std::min(kCheckedTokens, components_.config.max_model_len);
  const observe::ScaleFit fit = observe::FitOf(ProbeScales(tokens), components_.layout);
  if (given && fit.Fits()) return;
  const std::string what = given ? fmt::format("the KV scales of layers {} do not fit this model", layers)
                                 : fmt::format("no KV scales were given: layers {} use 1.0", layers);
  std::string message =
      fmt::format("{}; {:.4f} % of the values of a probe of {} tokens saturated, {:.4f} % became zero", what,
                  100 * fit.saturated, tokens, 100 * fit.zeroed);
  if (fit.max_zeroed > observe::ScaleFit::kMaxZeroed) {
    message += fmt::format(" ({:.1f} % of {})", 100 * fit.max_zeroed, fit.max_zeroed_side);
  }
  if (!fit.Fits()) message += "; see calculate_kv_scales and quantization_param_path";
  Warn(message);
}

void Engine::Impl::MeasureScales() {
  const int64_t tokens = std::min(kMeasuredTokens, components_.config.max_model_len);
  observe::ApplyProbe(ProbeScales(tokens), components_.layout, components_.scales);
  MakeBackend();
  float min_scale = INFINITY;
  float max_scale = 0;
  for (const formats::LayerScales& layer : components_.scales) {
    for (const auto* side : {&layer.k, &layer.v}) {
      for (const float scale : side->scale) {
        min_scale = std::min(min_scale, scale);
        max_scale = std::max(max_scale, scale);
      }
    }
  }
  Warn(fmt::format("KV scales of layers {} measured on a probe of {} tokens: from {:.6g} to {:.6g}",
                   observe::StaticLayers(components_.layout), tokens, min_scale, max_scale));
}

void Engine::Impl::WarnOfSaturation() noexcept {
  for (size_t i = 0; i < components_.layout.layers.size() && !saturation_warned_; ++i) {
    const formats::LayerScheme& layer = components_.layout.layers[i];
    const attention::AppendCounts counts = backend_->Counts(static_cast<int>(i));
    for (const bool is_key : {true, false}) {
      const formats::Side& side = is_key ? layer.k : layer.v;
      const attention::SideCounts& values = is_key ? counts.k : counts.v;
      // A few values above the largest do little in a quantized format; in fp16 they are the ones that attention is
      // about.
      const bool is_fp16 = side.format->code == formats::ElementType::kFp16;
      if (values.saturated == 0 || !(is_fp16 || values.saturated > values.values / 1000)) continue;
      saturation_warned_ = true;
      try {
        Warn(fmt::format("{} of {} values of {} of layer {} were above the largest of {}, and are stored as that; {}",
                         values.saturated, values.values, is_key ? "K" : "V", i, side.format->name,
                         is_fp16 ? "kv_cache_dtype = bf16 has their range" : "see calculate_kv_scales"));
      } catch (const std::bad_alloc&) {  // the counts remain in Stats()
      }
      break;
    }
  }
}

}  // namespace kvanta
