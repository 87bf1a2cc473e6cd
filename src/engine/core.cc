#include "engine/core.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "engine/turn.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

constexpr int64_t kMostLogitRows = 256;  // at once: bounds the logits' memory
constexpr int64_t kProbeTokens = 64;

bool PoisonByDefault() {
#ifdef NDEBUG
  return false;
#else
  return true;
#endif
}

}  // namespace

Core::Core(Parts parts) : parts_(std::move(parts)), demand_(parts_.layout, CommonWindow(parts_.model->Config())) {
  EngineConfig& config = parts_.config;
  CheckConfig(config);
  demand_.prefixes_stay = config.enable_prefix_caching;
  Device& device = parts_.model->ops().device();
  const CacheSize size = SizeCache(config, demand_, parts_.model->Config().max_position, device.AvailableBytes());
  if (!size.warning.empty()) Warn(size.warning);
  config.max_model_len = std::min(size.max_model_len, parts_.positions);
  config.kv_cache_memory_bytes = size.budget_bytes;
  config.poison_unused = config.poison_unused.value_or(PoisonByDefault());
  store_ = std::make_unique<cache::PageStore>(
      device, parts_.layout,
      cache::PageStoreConfig{.budget_bytes = size.budget_bytes, .poison_unused = *config.poison_unused});
  if (config.enable_prefix_caching) tree_ = std::make_unique<cache::PrefixTree>(*store_, config.page_size);
  scheduler_ = std::make_unique<scheduler::Scheduler>(
      scheduler::SchedulerConfig{.max_sequences = config.max_num_seqs,
                                 .max_step_tokens = config.max_num_batched_tokens,
                                 .page_size = config.page_size},
      *store_, tree_.get(), demand_);
  const int64_t logit_rows = std::clamp<int64_t>(config.max_num_seqs, 16, kMostLogitRows);
  runner_ =
      std::make_unique<runner::Runner>(*parts_.model, config.max_num_batched_tokens, logit_rows, !config.enforce_eager);
  masks_ = std::make_unique<StepMasks>(config.fill_masks, parts_.info.vocab);
  if (config.quality_sample_rate > 0) {
    quality_ = std::make_unique<QualityMonitor>(parts_, config.quality_sample_rate);
  }
  row_sampler_ = std::make_unique<runner::RowSampler>(*parts_.threads);
  measure_scales_ = config.calculate_kv_scales && !parts_.scales_given && HasStaticScales(parts_.layout);
  MakeBackend();  // checks the scales, which the probe relies on
  if (!measure_scales_ && !parts_.scales_given && HasStaticScales(parts_.layout)) WarnAboutUnitScales();
  const std::lock_guard lock(mutex_);
  RefreshStats();
}

Core::~Core() {
  Stop();
}

void Core::MakeBackend() {
  auto fresh = parts_.make_backend(*store_, {.layers = parts_.model->AttentionLayers(), .scales = parts_.scales});
  if (parts_.profile) fresh = Profiled(std::move(fresh), parts_.profile);
  const std::lock_guard lock(mutex_);  // Stats() reads it
  backend_ = std::move(fresh);
}

void Core::Warn(const std::string& message) const {
  try {
    if (parts_.config.on_warning) parts_.config.on_warning(message);
  } catch (...) {  // a listener's fault must not end a step or the loop
  }
}

// Says what the lack of scales costs on this model: random tokens are enough to see values beyond the format's range.
void Core::WarnAboutUnitScales() {
  std::mt19937 random(1);
  std::vector<int32_t> tokens(static_cast<size_t>(std::min(kProbeTokens, parts_.config.max_model_len)));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % static_cast<uint32_t>(parts_.info.vocab));
  const auto probe = ProbeKv(*parts_.model, parts_.make_backend, parts_.layout, parts_.scales, tokens,
                             parts_.config.max_num_batched_tokens);
  int64_t values = 0;
  int64_t above = 0;
  for (size_t layer = 0; layer < probe.size(); ++layer) {
    for (const auto& [side, seen] : {std::pair(&parts_.layout.layers[layer].k, &probe[layer].k),
                                     std::pair(&parts_.layout.layers[layer].v, &probe[layer].v)}) {
      if (!IsStatic(*side)) continue;
      values += seen->values;
      above += seen->above_unit;
    }
  }
  Warn(fmt::format(
      "no KV scales were given: layers {} use 1.0; {:.4f} % of the values of a probe of {} tokens "
      "saturated; see quantization_param_path and calculate_kv_scales",
      StaticLayers(parts_.layout), 100.0 * static_cast<double>(above) / static_cast<double>(values), tokens.size()));
}

void Core::MeasureScales(std::span<const int32_t> tokens) {
  const auto probe = ProbeKv(*parts_.model, parts_.make_backend, parts_.layout, parts_.scales, tokens,
                             parts_.config.max_num_batched_tokens);
  ApplyProbe(probe, parts_.layout, parts_.scales);
  MakeBackend();
  measure_scales_ = false;
  float least = INFINITY;
  float most = 0;
  for (const formats::LayerScales& layer : parts_.scales) {
    for (const auto* side : {&layer.k, &layer.v}) {
      for (const float scale : side->scale) {
        least = std::min(least, scale);
        most = std::max(most, scale);
      }
    }
  }
  Warn(fmt::format("KV scales of layers {} measured on the first {} tokens and frozen: from {:.6g} to {:.6g}",
                   StaticLayers(parts_.layout),
                   std::min<int64_t>(kMostProbedTokens, static_cast<int64_t>(tokens.size())), least, most));
}

void Core::ResetPrefixCache() {
  const Turn turn(*this);
  if (tree_) tree_->Clear();
}

}  // namespace kvanta::engine
