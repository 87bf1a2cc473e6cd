#include <algorithm>
#include <new>

#include "engine/cache_stats.h"
#include "engine/engine_impl.h"

namespace kvanta {

void Engine::Impl::CountFinish(FinishReason finish) noexcept {
  switch (finish) {
    case FinishReason::kNone:
      break;
    case FinishReason::kStop:
      ++counters_.finished_stop;
      break;
    case FinishReason::kLength:
      ++counters_.finished_length;
      break;
    case FinishReason::kAbort:
      ++counters_.finished_abort;
      break;
    case FinishReason::kError:
      ++counters_.finished_error;
      break;
    case FinishReason::kTimeout:
      ++counters_.finished_timeout;
      break;
  }
}

void Engine::Impl::RefreshStats() noexcept {
  counters_.running = scheduler_->Running();
  counters_.waiting = scheduler_->Waiting();
  counters_.preemptions = scheduler_->Preemptions();
  counters_.prompt_token_seconds = scheduler_->PromptTokenSeconds();
  counters_.prompt_seconds_left = scheduler_->PromptSecondsLeft();
  counters_.prefix_queries = scheduler_->PrefixQueries();
  counters_.cached_tokens = scheduler_->PrefixHits();
  const cache::PagePool& pool = cache_->pool;
  counters_.demotions = cache_->demotions;
  counters_.seconds_demotion = cache_->demotion_seconds;
  counters_.prefix_evictions = cache_->prefix ? cache_->prefix->Evictions() : 0;
  counters_.prefix_pinned_bytes = cache_->prefix ? cache_->prefix->PinnedBytes() : 0;
  counters_.prefix_pages = cache_->prefix ? cache_->prefix->Pages() : 0;
  counters_.page_size = components_.layout.page_size;
  counters_.page_bytes = components_.layout.page_bytes;
  counters_.exact_page_bytes = components_.layout.exact_page_bytes;
  counters_.bytes_per_token = cache_->spec.BytesPerToken(components_.config.max_model_len);
  counters_.pages_used = counters_.exact_pages_used = 0;
  for (int group = 0; group < pool.Groups(); ++group) {
    CacheGroupStats& stats = counters_.groups[static_cast<size_t>(group)];
    stats.pages_used = pool.UsedPages(group, cache::PageKind::kQuantized);
    stats.exact_pages_used = pool.UsedPages(group, cache::PageKind::kExact);
    int64_t pages = stats.pages_used;
    for (size_t level = 0; level < stats.level_pages_used.size(); ++level) {
      pages += stats.level_pages_used[level] = pool.UsedPages(group, cache::kAgedKinds[level]);
    }
    counters_.pages_used = std::max(counters_.pages_used, pages);
    counters_.exact_pages_used = std::max(counters_.exact_pages_used, stats.exact_pages_used);
  }
  counters_.pages_free = (pool.BudgetBytes() - pool.UsedBytes()) / components_.layout.page_bytes;
  counters_.cache_used_bytes = pool.UsedBytes();
  counters_.cache_evictable_bytes = pool.EvictableBytes();
  counters_.cache_budget_bytes = pool.BudgetBytes();
  if (tiers_) {
    counters_.host = tiers_->HostStats();
    counters_.disk = tiers_->FolderStats();
    counters_.store = tiers_->ServerStats();
    counters_.loads_timed_out = tiers_->LoadsGivenUp().timeouts;
    counters_.loads_out_of_memory = tiers_->LoadsGivenUp().out_of_memory;
  }
  counters_.loading = tiers_ ? tiers_->Loading() : 0;
  if (quality_) counters_.quality = quality_->Stats();
  try {
    if (spec_decode_) spec_decode_->Count(counters_);
    if (components_.profile) counters_.profile = components_.profile->Rows();
    stats_ = counters_;
  } catch (const std::bad_alloc&) {  // the statistics stay those of an earlier step
  }
}

EngineStats Engine::Impl::Stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting += queue_.Waiting();
  stats.refused = refused_;
  stats.seconds_callback = seconds_callback_;
  stats.weight_bytes = components_.model->WeightBytes();
  stats.backend = backend_->Info().name;
  stats.isa = components_.isa;
  stats.device = components_.config.device;
  stats.threads = components_.config.threads;
  stats.layers.resize(components_.layout.layers.size());
  for (size_t i = 0; i < stats.layers.size(); ++i) {
    LayerStats& layer = stats.layers[i];
    const formats::LayerScheme& scheme = components_.layout.layers[i];
    layer.scheme = scheme.scheme.ToString();
    layer.page_bytes = scheme.bytes;
    layer.levels = engine::DescribeLevels(scheme);
    const attention::AppendCounts counts = backend_->Counts(static_cast<int>(i));
    const formats::LayerScales& scales = backend_->Scales(static_cast<int>(i));
    if (observe::IsStatic(scheme.k)) layer.k_scale = scales.k.scale;
    if (observe::IsStatic(scheme.v)) layer.v_scale = scales.v.scale;
    layer.k_values = counts.k.values;
    layer.k_saturated = counts.k.saturated;
    layer.k_nan = counts.k.nan;
    layer.v_values = counts.v.values;
    layer.v_saturated = counts.v.saturated;
    layer.v_nan = counts.v.nan;
    layer.k_blocks = counts.k.blocks;
    layer.k_zero_blocks = counts.k.zero_blocks;
    layer.v_blocks = counts.v.blocks;
    layer.v_zero_blocks = counts.v.zero_blocks;
  }
  return stats;
}

}  // namespace kvanta
