// Statistics of an engine: counters, cache and layers, profile, cache quality, distributions of keys and values.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvanta/cache_folder.h"
#include "kvanta/metric.h"

namespace kvanta {

// A level of precision by age, or the only one: its formats, and its layer's bytes in a record.
struct LayerLevel {
  std::string scheme;
  int64_t page_bytes = 0;
};

struct LayerStats {
  std::string scheme;
  int64_t page_bytes = 0;               // bytes of this layer in a quantized record
  std::vector<LayerLevel> levels;       // the first one is that of quantized records
  std::vector<float> k_scale, v_scale;  // static scales in use, read back from the attention backend; empty: none
  int64_t k_values = 0, k_saturated = 0, k_nan = 0;
  int64_t v_values = 0, v_saturated = 0, v_nan = 0;
  // Scales of blocks (or of rows, where a format has one per row), and how many are zero: their values decode to zero.
  // 0 where the format has no such scale, adds an offset to it, or shares it among tokens.
  int64_t k_blocks = 0, k_zero_blocks = 0, v_blocks = 0, v_zero_blocks = 0;
};

// Shadow evaluation of finished requests: KL(exact cache || served cache) in nats at every generated token of the
// sampled ones, at most 2,048 tokens of each.
struct QualityStats {
  int64_t requests = 0, tokens = 0;  // compared
  int64_t pending = 0;               // requests that wait for the engine to be idle
  int64_t skipped = 0;               // sampled, but too many were pending, the prompt was too long, or memory was short
  double kl_sum = 0, kl_max = 0;     // mean: kl_sum / tokens
};

// Time of one operation of the model: "attention", "append", "norm", "linear q_proj|k_proj|v_proj", ...
struct ProfileRow {
  std::string name;
  double seconds = 0;
  int64_t calls = 0;
};

// A KV cache group: layers of the same visibility and page rule, which share a block table and page pools.
struct CacheGroupStats {
  std::string visibility;  // "full", "sliding_window=1024", "chunked=8192"
  std::vector<int> layers;
  int64_t page_bytes = 0, exact_page_bytes = 0;  // one record, all layers of the group
  int64_t pages_used = 0, exact_pages_used = 0;
  std::vector<int64_t> level_page_bytes, level_pages_used;  // likewise, of the later levels of precision by age
};

// Upper bounds of EngineStats::step_tokens.
inline constexpr std::array<int64_t, 13> kStepTokenBounds = {1,   8,    16,   32,   64,   128,  256,
                                                             512, 1024, 2048, 4096, 8192, 16384};

struct EngineStats {
  int64_t running = 0, waiting = 0, preemptions = 0, steps = 0;
  int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;  // computed; from the prefix cache; sampled
  // Steps by the sum of their computed prompt tokens and sampled tokens; the last entry: above all bounds.
  std::array<int64_t, kStepTokenBounds.size() + 1> step_tokens = {};
  void CountStepTokens(int64_t tokens) noexcept {
    const auto bound = std::lower_bound(kStepTokenBounds.begin(), kStepTokenBounds.end(), tokens);
    ++step_tokens[static_cast<size_t>(bound - kStepTokenBounds.begin())];
  }
  // Steps whose time was predicted, and those within 15 % of it.
  int64_t steps_predicted = 0, steps_predicted_well = 0;
  void CountPrediction(double expected, double seconds) noexcept {
    if (expected <= 0) return;
    ++steps_predicted;
    if (std::abs(expected - seconds) <= 0.15 * seconds) ++steps_predicted_well;
  }
  double prompt_token_seconds = 0;  // time of one token of a prompt, by that prediction
  double prompt_seconds_left = 0;   // likewise, of the prompts of unfinished requests
  int64_t prefix_queries = 0;       // prompt tokens looked up in the prefix cache
  int64_t prefix_evictions = 0;     // pages evicted from the prefix cache
  int64_t demotions = 0;            // pages demoted to a later level, with precision by pressure
  double seconds_demotion = 0;      // spent on that
  int64_t finished_stop = 0, finished_length = 0, finished_abort = 0, finished_error = 0, finished_timeout = 0;
  int64_t refused = 0;  // by Add with QueueFullError
  // Speculative decoding: drafts verified, their tokens, and those that became output; accepted_per_position[i]: drafts
  // whose token i did, [num_speculative_tokens].
  int64_t drafts = 0, draft_tokens = 0, accepted_tokens = 0;
  std::vector<int64_t> accepted_per_position;
  // A draft model, whose cache is not in cache_budget_bytes; 0 without one.
  double seconds_draft = 0;  // time of its proposals
  int64_t draft_weight_bytes = 0, draft_cache_used_bytes = 0, draft_cache_budget_bytes = 0;
  int64_t page_size = 0;
  int64_t page_bytes = 0, exact_page_bytes = 0;  // one record, all layers
  double bytes_per_token = 0;                    // page_bytes / page_size; with ages, the mean of max_model_len tokens
  // Pages of the group that uses most, each counted in every level that it is in; free: how many more pages of all
  // groups fit.
  int64_t pages_used = 0, pages_free = 0, exact_pages_used = 0;
  std::vector<CacheGroupStats> groups;
  int64_t cache_used_bytes = 0, cache_budget_bytes = 0;
  int64_t cache_evictable_bytes = 0;  // used bytes that only the prefix cache holds
  int64_t prefix_pages = 0;           // pages held by the prefix cache
  int64_t prefix_pinned_bytes = 0;    // the part kept for a time (SamplingParams::cache_ttl)
  CacheTierStats host;                // zeros without EngineConfig::kv_offload_bytes
  CacheTierStats disk;                // zeros without EngineConfig::kv_cache_dir
  CacheTierStats store;               // zeros without EngineConfig::kv_store
  int64_t loading = 0;                // waiting requests whose pages are looked up or read in these
  // Loads given up, whose requests were computed: they took too long, or there was no memory for their pages.
  int64_t loads_timed_out = 0, loads_out_of_memory = 0;
  int64_t weight_bytes = 0;
  std::string backend, isa, device;
  int threads = 0;
  // Seconds of steps: in all; in the model, logits included; choosing chunks; in BitmaskFn; sampling.
  double seconds_total = 0, seconds_forward = 0, seconds_schedule = 0, seconds_masks = 0, seconds_sample = 0;
  double seconds_callback = 0;      // in the callback of Start(), not part of seconds_total
  std::vector<ProfileRow> profile;  // parts of seconds_forward, with EngineConfig::profile
  QualityStats quality;
  std::vector<LayerStats> layers;

  // Calls visit(path, get, metric) for every field that stands for itself; std::invoke(get, stats) is its value. The
  // path is its place in LLM.stats(): a part after a dot lies in a dictionary of its own. Paths and metrics last as
  // long as the call. Python's dictionaries and /metrics derive from this list.
  template <class Visitor>
  static void VisitFields(Visitor&& visit) {
    const auto gauge = [&](const char* path, auto member, const char* name, const char* help, const char* with = "") {
      visit(path, member, Metric{MetricKind::kGauge, name, help, with});
    };
    const auto counter = [&](const char* path, auto member, const char* name, const char* help, const char* with = "") {
      visit(path, member, Metric{MetricKind::kCounter, name, help, with});
    };
    const auto value = [&](const char* path, auto member) { visit(path, member, Metric{}); };
    using S = EngineStats;
    gauge("running", &S::running, "num_requests_running", "Sequences that the engine computes now.");
    gauge("waiting", &S::waiting, "num_requests_waiting", "Sequences in the queue.");
    counter("preemptions", &S::preemptions, "num_preemptions", "Sequences sent back to wait for pages.");
    counter("steps", &S::steps, "engine_steps", "Forward passes.");
    counter("steps_predicted", &S::steps_predicted, "predicted_steps", "Steps whose time was predicted.");
    counter("steps_predicted_well", &S::steps_predicted_well, "well_predicted_steps",
            "Steps that took what was predicted, within 15 %.");
    gauge("prompt_token_seconds", &S::prompt_token_seconds, "prompt_token_seconds",
          "Time that one token of a prompt takes.");
    gauge("prompt_seconds_left", &S::prompt_seconds_left, "prompt_queue_seconds",
          "Time that the prompts of unfinished requests still take.");
    value("prompt_tokens", &S::prompt_tokens);
    counter("cached_tokens", &S::cached_tokens, "prefix_cache_hits", "Prompt tokens found in the prefix cache.");
    counter("generated_tokens", &S::generated_tokens, "generation_tokens", "New tokens.");
    counter("prefix_queries", &S::prefix_queries, "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.");
    counter("demotions", &S::demotions, "kv_cache_demotions", "Pages demoted to a later level for want of memory.");
    counter("seconds_demotion", &S::seconds_demotion, "kv_cache_demotion_seconds",
            "Seconds spent on the demotion of pages.");
    counter("prefix_evictions", &S::prefix_evictions, "prefix_cache_evictions",
            "Pages that the prefix cache gave up for others.");
    value("refused", &S::refused);
    value("finished.stop", &S::finished_stop);
    value("finished.length", &S::finished_length);
    value("finished.abort", &S::finished_abort);
    value("finished.error", &S::finished_error);
    value("finished.timeout", &S::finished_timeout);
    constexpr const char* kSpeculates = "speculation.accepted_per_position";
    counter("speculation.drafts", &S::drafts, "spec_decode_num_drafts", "Drafts that were verified.", kSpeculates);
    counter("speculation.draft_tokens", &S::draft_tokens, "spec_decode_num_draft_tokens",
            "Draft tokens that were verified.", kSpeculates);
    counter("speculation.accepted_tokens", &S::accepted_tokens, "spec_decode_num_accepted_tokens",
            "Draft tokens that were accepted.", kSpeculates);
    value("speculation.accepted_per_position", &S::accepted_per_position);
    constexpr const char* kDraftModel = "speculation.draft_weight_bytes";
    counter("speculation.seconds_draft", &S::seconds_draft, "draft_model_seconds",
            "Time of the draft model's proposals.", kDraftModel);
    value("speculation.draft_weight_bytes", &S::draft_weight_bytes);
    gauge("speculation.draft_cache_used_bytes", &S::draft_cache_used_bytes, "draft_cache_used_bytes",
          "Memory of the draft model's pages.", kDraftModel);
    gauge("speculation.draft_cache_budget_bytes", &S::draft_cache_budget_bytes, "draft_cache_budget_bytes",
          "Limit of the draft model's cache.", kDraftModel);
    value("page_size", &S::page_size);
    value("page_bytes", &S::page_bytes);
    value("exact_page_bytes", &S::exact_page_bytes);
    gauge("bytes_per_token", &S::bytes_per_token, "kv_cache_bytes_per_token", "Cache bytes of one token, all layers.");
    gauge("pages_used", &S::pages_used, "kv_cache_pages_used",
          "Pages with tokens, those of the prefix cache included.");
    gauge("pages_free", &S::pages_free, "kv_cache_pages_free", "Pages that the memory left would hold.");
    gauge("exact_pages_used", &S::exact_pages_used, "kv_cache_exact_pages_used", "Exact (bf16) records of pages.");
    value("cache_used_bytes", &S::cache_used_bytes);
    gauge("cache_budget_bytes", &S::cache_budget_bytes, "kv_cache_budget_bytes", "Memory of the cache.");
    gauge("cache_evictable_bytes", &S::cache_evictable_bytes, "kv_cache_evictable_bytes",
          "Memory in use that only the prefix cache holds.");
    gauge("prefix_pages", &S::prefix_pages, "kv_cache_prefix_pages", "Pages in the prefix cache.");
    gauge("prefix_pinned_bytes", &S::prefix_pinned_bytes, "kv_cache_pinned_bytes",
          "Bytes of the prefix cache that a cache_ttl keeps.");
    VisitTier(CacheTier::kHost, "host", &S::host, visit);
    VisitTier(CacheTier::kDisk, "disk", &S::disk, visit);
    VisitTier(CacheTier::kStore, "store", &S::store, visit);
    value("loading", &S::loading);
    counter("loads_timed_out", &S::loads_timed_out, "prefix_loads_timed_out",
            "Requests computed because reading their stored pages took too long.");
    counter("loads_out_of_memory", &S::loads_out_of_memory, "prefix_loads_out_of_memory",
            "Requests computed because there was no memory for their stored pages.");
    gauge("weight_bytes", &S::weight_bytes, "weight_bytes", "Memory of the weights.");
    value("backend", &S::backend);
    value("isa", &S::isa);
    value("device", &S::device);
    value("threads", &S::threads);
    counter("seconds_total", &S::seconds_total, "engine_step_seconds", "Time in steps.");
    counter("seconds_forward", &S::seconds_forward, "engine_forward_seconds", "Time of steps in the model itself.");
    counter("seconds_schedule", &S::seconds_schedule, "engine_schedule_seconds",
            "Time of steps that chooses what to compute.");
    counter("seconds_masks", &S::seconds_masks, "engine_masks_seconds",
            "Time of steps that asks which tokens structured output allows.");
    counter("seconds_sample", &S::seconds_sample, "engine_sample_seconds", "Time of steps that chooses tokens.");
    counter("seconds_callback", &S::seconds_callback, "engine_callback_seconds",
            "Time outside steps that hands over their outputs.");
  }

 private:
  template <class Visitor>
  static void VisitTier(CacheTier tier, const std::string& name, CacheTierStats EngineStats::*stats, Visitor& visit) {
    const std::string enabled = name + ".enabled";
    CacheTierStats::VisitFields(tier, [&](const std::string& field, auto member, Metric metric) {
      const std::string path = name + "." + field;
      const std::string metric_name = name + "_cache_" + metric.name;
      metric.name = metric_name.c_str();
      metric.with = enabled.c_str();
      visit(
          path.c_str(), [=](const EngineStats& all) { return all.*stats.*member; }, metric);
    });
  }
};

// One step of the engine's own thread.
struct StepTiming {
  int sequences = 0;          // requests that got tokens
  float outside_seconds = 0;  // time outside the model, the callback included
};

// Magnitudes and moments of the keys and values of a text, for calibration. Index 0 of an axis of 2 is K after RoPE, 1
// is V. Statistics of several texts combine: counts and sums by +, amax by max.
struct KvStatistics {
  int64_t tokens = 0;
  int layers = 0, kv_heads = 0, head_dim = 0;  // the most of any layer; others have zeros after theirs
  std::vector<float> edges;        // [bins + 1]: histogram[..][i] counts magnitudes in [edges[i], edges[i + 1])
  std::vector<int64_t> histogram;  // [layers][2][kv_heads][bins]; the first and last bin include all beyond them
  std::vector<float> amax;         // [layers][2][kv_heads][head_dim], as all below
  std::vector<double> sum, square_sum;
};

// Second moments of the keys and queries of a text for +query, after RoPE at the text's positions or averaged over all
// positions of contexts of given lengths. Those of several texts combine by +, amax by max.
struct QueryMoments {
  int64_t tokens = 0;  // counted ones: a sequence's first page is left out, since it is always read exactly
  int layers = 0, kv_heads = 0, head_dim = 0;
  std::vector<float> amax;           // [layers][2][kv_heads]: largest magnitudes of all tokens' K and V
  std::vector<double> key_sum;       // [layers][kv_heads][head_dim]
  std::vector<double> key_moment;    // [layers][kv_heads][head_dim][head_dim]: sums of k k^T
  std::vector<double> query_moment;  // likewise, of q q^T over the query heads of a KV head
  // Likewise, of some queries, each weighted by what an error of its logits for quantized pages costs: the sum of
  // p^2 |v - o|^2 over their tokens, p the probability, v the value, o the query's output. Empty if not asked for.
  std::vector<double> weighted_query_moment;
};

}  // namespace kvanta
