#include "engine/engine_impl.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/cache_identity.h"
#include "engine/cache_stats.h"
#include "engine/ranks.h"
#include "kvanta/error.h"
#include "store/record_folder.h"

namespace kvanta {
namespace {

bool PoisonByDefault() {
#ifdef NDEBUG
  return false;
#else
  return true;
#endif
}

}  // namespace

Engine::Impl::Impl(engine::EngineComponents components) : components_(std::move(components)) {
  EngineConfig& config = components_.config;
  engine::CheckConfig(config);
  const std::vector<cache::Visibility> visibility = engine::LayerVisibility(components_.model->Config());
  const cache::KvCacheSpec spec(components_.layout, visibility, config.decode_context_parallel_size);
  has_states_ = std::ranges::any_of(spec.groups, &cache::KvCacheGroup::IsRecurrent);
  Device& device = components_.model->ops().device();
  const engine::CacheSpecs specs{.target = spec,
                                 .draft = components_.proposer ? components_.proposer->CacheSpec() : nullptr};
  const engine::CacheSize size = engine::SizeCache(config, specs, components_.model->Config().max_position,
                                                   engine::AvailableBytes(config, device));
  if (!size.warning.empty()) Warn(size.warning);
  config.max_model_len = std::min(size.max_model_len, components_.positions);
  config.kv_cache_memory_bytes = size.budget_bytes;
  config.poison_unused = config.poison_unused.value_or(PoisonByDefault());
  const int64_t draft_bytes = specs.DraftBytes(size.budget_bytes, config.max_model_len);
  if (specs.draft != nullptr) {
    components_.proposer->ReserveCache({.budget_bytes = draft_bytes, .poison_unused = *config.poison_unused});
  }
  if (components_.proposer) {
    spec_decode_.emplace(*components_.proposer,
                         engine::SpecDecodeConfig{.num_speculative_tokens = components_.num_speculative_tokens,
                                                  .max_model_len = config.max_model_len,
                                                  .max_draft_rows = components_.model->MaxDraftRows(),
                                                  .target_weight_bytes = components_.model->WeightBytes(),
                                                  .draft_cost = components_.draft_cost});
  }
  cache_ =
      std::make_unique<cache::KvCacheManager>(device, components_.layout, visibility,
                                              cache::PagePoolConfig{.budget_bytes = size.budget_bytes - draft_bytes,
                                                                    .poison_unused = *config.poison_unused,
                                                                    .lists_changes = !components_.ranks->IsSingleRank(),
                                                                    .ranks = config.decode_context_parallel_size},
                                              config.enable_prefix_caching, &components_.model->ops().threads());
  host_memory_ = engine::ReserveHostMemory(config, components_.layout, device);
  counters_.groups = engine::DescribeGroups(spec);
  steps_ = engine::StepsInFlight(static_cast<size_t>(config.pipeline_parallel_size));
  scheduler_ = std::make_unique<scheduler::Scheduler>(
      scheduler::SchedulerConfig{
          .max_sequences = config.max_num_seqs,
          .max_step_tokens = std::max(config.page_size, config.max_num_batched_tokens / config.pipeline_parallel_size),
          .page_size = config.page_size,
          .whole_sequences = components_.model->Config().AttendsInBothDirections(),
          .steps_in_flight = config.pipeline_parallel_size,
          .max_step_seconds = config.max_step_ms.value_or(0) / 1000,
          .prompts = {.shortest_first = config.scheduling_policy != "fcfs",
                      .max_delay = config.max_prompt_delay,
                      .fair = config.fair_by != "none"},
          .max_partial_prompts = config.max_num_partial_prefills,
          .max_long_partial_prompts = config.max_long_partial_prefills,
          .long_prompt_tokens = config.max_long_partial_prefills > 0 && config.long_prefill_token_threshold == 0
                                    ? std::max<int64_t>(1, config.max_model_len / 25)  // as in vLLM
                                    : config.long_prefill_token_threshold},
      *cache_);
  runner_ = std::make_unique<runner::Runner>(*components_.model, config.max_num_batched_tokens,
                                             engine::MaxLogitRows(config), engine::GraphsOf(components_));
  if (spec_decode_ && spec_decode_->ReadsHiddenStates()) runner_->KeepHiddenStates();
  if (!components_.ranks->IsSingleRank()) {
    engine::ValueOfRank0(*components_.ranks, size.budget_bytes);
    const auto division =
        config.pipeline_parallel_size > 1 ? runner::Division::kPipelineParallel : runner::Division::kTensorParallel;
    runner_->SetStepSender(std::make_unique<runner::StepSender>(*components_.ranks, cache_->pool, division));
  }
  masks_ = std::make_unique<engine::GrammarBitmasks>(config.fill_masks, components_.info.vocab);
  if (config.quality_sample_rate > 0) {
    if (spec.floors != 0) {
      throw InputError(
          fmt::format("quality_sample_rate = {}: not supported with kv_cache_floor: what answers are read "
                      "with changes; leave one of them out",
                      config.quality_sample_rate));
    }
    const models::ModelConfig& model = components_.model->Config();
    const KvScheme exact = KvScheme::Parse(engine::UnquantizedScheme(ParseDType(components_.info.dtype)));
    const std::vector<KvScheme> schemes(components_.layout.layers.size(), exact);
    quality_ = std::make_unique<observe::QualityMonitor>(
        observe::QualitySetup{.model = *components_.model,
                              .make_backend = components_.make_backend,
                              .scales = components_.scales,
                              .served = components_.layout,
                              .exact = engine::PlanLayout(schemes, model, config.page_size, {})},
        config.quality_sample_rate);
  }
  row_sampler_ = std::make_unique<runner::RowSampler>(*components_.threads);
  MakeBackend();  // checks the scales before the probe uses them
  if (observe::HasStaticScales(components_.layout)) {
    if (config.calculate_kv_scales && !components_.scales_given) {
      MeasureScales();
    } else {
      CheckScales();
    }
  }
  if (config.kv_events_queue_size > 0) {
    kv_events_ = std::make_unique<engine::KvEventLog>(static_cast<size_t>(config.kv_events_queue_size));
  }
  OpenTiers();
  if (kv_events_) kv_events_->Attach(*cache_, engine::CacheIdentity(components_));
  if (const std::string warning = store::WarnOfOtherWriters(config.kv_cache_dir); !warning.empty()) Warn(warning);
  const std::lock_guard lock(mutex_);
  RefreshStats();
}

Engine::Impl::~Impl() {
  Stop();
  tiers_.reset();  // its threads report to this object
}

void Engine::Impl::OpenTiers() {
  const EngineConfig& config = components_.config;
  if (!host_memory_ && config.kv_cache_dir.empty() && config.kv_store.empty()) return;
  const auto on_progress = [this] {
    const std::lock_guard lock(mutex_);
    loads_progressed_ = true;
    work_available_.notify_all();
  };
  tiers_ = std::make_unique<engine::StoreTiers>(*cache_,
                                                store::RecordStoreConfig{.memory = host_memory_,
                                                                         .folder = config.kv_cache_dir,
                                                                         .limit_bytes = config.kv_cache_dir_bytes,
                                                                         .server = components_.kv_store,
                                                                         .server_ttl_seconds = config.kv_store_ttl,
                                                                         .identity = engine::CacheIdentity(components_),
                                                                         .record_bytes = {},
                                                                         .on_progress = on_progress,
                                                                         .before_read = components_.before_read,
                                                                         .before_write = components_.before_write,
                                                                         .now = components_.now,
                                                                         .answer_seconds = components_.answer_seconds});
}

void Engine::Impl::MakeBackend() {
  auto fresh = components_.make_backend(cache_->pool, {.layers = components_.model->AttentionLayers(),
                                                       .scales = components_.scales,
                                                       .ranks = engine::RanksOfPages(components_)});
  if (components_.profile) fresh = observe::Profiled(std::move(fresh), components_.profile);
  const std::lock_guard lock(mutex_);  // Stats() reads it
  backend_ = std::move(fresh);
  if (cache_->spec.floors == 0) return;
  cache_->encode_levels = [this](int group, const uint8_t* quantized, std::span<uint8_t* const> later) {
    backend_->EncodeLevels(group, quantized, later);
  };
}

void Engine::Impl::Warn(const std::string& message) const noexcept {
  try {
    if (components_.config.on_warning) components_.config.on_warning(message);
  } catch (...) {  // an exception of on_warning must not end a step or the loop
  }
}

void Engine::Impl::ResetPrefixCache() {
  const StepLock step_lock(*this);
  if (components_.proposer) components_.proposer->ResetPrefixCache();
  if (!cache_->prefix) return;
  cache_->prefix->Clear();
  if (kv_events_ && cache_->prefix->Pages() == 0) kv_events_->Clear();
}

std::string Engine::Impl::CacheIdentity() {
  const StepLock step_lock(*this);
  return engine::CacheIdentity(components_);
}

void Engine::Impl::FlushPrefixCache() {
  engine::StoreTiers* tiers = nullptr;
  {
    const StepLock step_lock(*this);
    tiers = tiers_.get();
  }
  if (tiers == nullptr) return;
  tiers->Flush();
  const StepLock step_lock(*this);  // refreshes Stats(), which then count what was written
}

std::vector<KvEvent> Engine::Impl::TakeKvEvents(double timeout_seconds) {
  if (!kv_events_) throw InputError("TakeKvEvents needs kv_events_queue_size");
  if (std::isnan(timeout_seconds)) throw InputError("timeout_seconds is NaN; expected a number of seconds");
  if (auto events = kv_events_->Take(timeout_seconds)) return *std::move(events);
  const StepLock step_lock(*this);
  return kv_events_->Restart();
}

std::vector<KvEvent> Engine::Impl::CachedPages() {
  if (!kv_events_) throw InputError("CachedPages needs kv_events_queue_size");
  const StepLock step_lock(*this);
  return kv_events_->Pages();
}

}  // namespace kvanta
