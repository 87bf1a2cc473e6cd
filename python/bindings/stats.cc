// Statistics as plain dictionaries, for logs and --json.
#include "stats.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <limits>

namespace nb = nanobind;

namespace kvanta::python {
namespace {

nb::dict Quality(const QualityStats& quality) {
  nb::dict result;
  result["requests"] = quality.requests;
  result["tokens"] = quality.tokens;
  result["pending"] = quality.pending;
  result["skipped"] = quality.skipped;
  result["kl_mean"] = quality.tokens > 0 ? quality.kl_sum / static_cast<double>(quality.tokens) : 0.0;
  result["kl_max"] = quality.kl_max;
  return result;
}

// Zeros for a tier that there is not.
nb::dict Tier(const CacheTierStats& tier) {
  nb::dict result;
  result["enabled"] = tier.enabled;
  result["lookup_tokens"] = tier.lookup_tokens;
  result["hit_tokens"] = tier.hit_tokens;
  result["declined_tokens"] = tier.declined_tokens;
  result["read_bytes"] = tier.read_bytes;
  result["written_bytes"] = tier.written_bytes;
  result["read_seconds"] = tier.read_seconds;
  result["write_seconds"] = tier.write_seconds;
  result["read_errors"] = tier.read_errors;
  result["write_errors"] = tier.write_errors;
  result["dropped_records"] = tier.dropped_records;
  return result;
}

// A tier with a limit; `count`: the name of its number of records.
nb::dict LimitedTier(const CacheTierStats& tier, const char* count) {
  nb::dict result = Tier(tier);
  result[count] = tier.files;
  result["bytes"] = tier.bytes;
  result["limit_bytes"] = tier.limit_bytes;
  result["evictions"] = tier.evictions;
  return result;
}

nb::dict Disk(const CacheTierStats& disk) {
  nb::dict result = LimitedTier(disk, "files");
  result["own_bytes"] = disk.own_bytes;
  result["damaged_files"] = disk.damaged_files;
  return result;
}

nb::dict Store(const CacheTierStats& store) {
  nb::dict result = Tier(store);
  result["connects"] = store.connects;
  result["damaged_records"] = store.damaged_files;
  return result;
}

nb::dict Counts(int64_t values, int64_t saturated, int64_t nan, int64_t blocks, int64_t zero_blocks) {
  nb::dict counts;
  counts["values"] = values;
  counts["saturated"] = saturated;
  counts["nan"] = nan;
  counts["blocks"] = blocks;
  counts["zero_blocks"] = zero_blocks;
  return counts;
}

}  // namespace

nb::list GroupDicts(const std::vector<CacheGroupStats>& groups) {
  nb::list rows;
  for (const CacheGroupStats& group : groups) {
    nb::dict row;
    row["visibility"] = group.visibility;
    row["layers"] = nb::cast(group.layers);
    row["page_bytes"] = group.page_bytes;
    row["exact_page_bytes"] = group.exact_page_bytes;
    row["pages_used"] = group.pages_used;
    row["exact_pages_used"] = group.exact_pages_used;
    rows.append(row);
  }
  return rows;
}

nb::dict StatsDict(const EngineStats& stats) {
  nb::dict result;
  result["running"] = stats.running;
  result["waiting"] = stats.waiting;
  result["preemptions"] = stats.preemptions;
  result["steps"] = stats.steps;
  result["prompt_tokens"] = stats.prompt_tokens;
  result["cached_tokens"] = stats.cached_tokens;
  result["generated_tokens"] = stats.generated_tokens;
  nb::list step_tokens;  // (upper bound, steps)
  for (size_t i = 0; i < stats.step_tokens.size(); ++i) {
    const bool last = i == kStepTokenBounds.size();
    const double bound = last ? std::numeric_limits<double>::infinity() : static_cast<double>(kStepTokenBounds[i]);
    step_tokens.append(nb::make_tuple(bound, stats.step_tokens[i]));
  }
  result["step_tokens"] = step_tokens;
  result["prefix_queries"] = stats.prefix_queries;
  result["prefix_evictions"] = stats.prefix_evictions;
  result["refused"] = stats.refused;
  nb::dict speculation;
  speculation["drafts"] = stats.drafts;
  speculation["draft_tokens"] = stats.draft_tokens;
  speculation["accepted_tokens"] = stats.accepted_tokens;
  speculation["accepted_per_position"] = nb::cast(stats.accepted_per_position);
  speculation["seconds_draft"] = stats.seconds_draft;
  speculation["draft_weight_bytes"] = stats.draft_weight_bytes;
  speculation["draft_cache_used_bytes"] = stats.draft_cache_used_bytes;
  speculation["draft_cache_budget_bytes"] = stats.draft_cache_budget_bytes;
  result["speculation"] = speculation;
  nb::dict finished;
  finished["stop"] = stats.finished_stop;
  finished["length"] = stats.finished_length;
  finished["abort"] = stats.finished_abort;
  finished["error"] = stats.finished_error;
  finished["timeout"] = stats.finished_timeout;
  result["finished"] = finished;
  result["page_size"] = stats.page_size;
  result["page_bytes"] = stats.page_bytes;
  result["exact_page_bytes"] = stats.exact_page_bytes;
  result["bytes_per_token"] = stats.bytes_per_token;
  result["pages_used"] = stats.pages_used;
  result["pages_free"] = stats.pages_free;
  result["exact_pages_used"] = stats.exact_pages_used;
  result["cache_used_bytes"] = stats.cache_used_bytes;
  result["cache_budget_bytes"] = stats.cache_budget_bytes;
  result["cache_evictable_bytes"] = stats.cache_evictable_bytes;
  result["groups"] = GroupDicts(stats.groups);
  result["prefix_pages"] = stats.prefix_pages;
  result["prefix_pinned_bytes"] = stats.prefix_pinned_bytes;
  result["weight_bytes"] = stats.weight_bytes;
  result["backend"] = stats.backend;
  result["isa"] = stats.isa;
  result["device"] = stats.device;
  result["threads"] = stats.threads;
  result["seconds_total"] = stats.seconds_total;
  result["seconds_forward"] = stats.seconds_forward;
  result["seconds_schedule"] = stats.seconds_schedule;
  result["seconds_masks"] = stats.seconds_masks;
  result["seconds_sample"] = stats.seconds_sample;
  result["seconds_callback"] = stats.seconds_callback;
  nb::list profile;
  for (const ProfileRow& row : stats.profile) {
    nb::dict entry;
    entry["name"] = row.name;
    entry["seconds"] = row.seconds;
    entry["calls"] = row.calls;
    profile.append(entry);
  }
  result["profile"] = profile;
  result["quality"] = Quality(stats.quality);
  result["host"] = LimitedTier(stats.host, "records");
  result["disk"] = Disk(stats.disk);
  result["store"] = Store(stats.store);
  result["loading"] = stats.loading;
  int64_t saturated = 0;
  int64_t nan = 0;
  nb::list layers;
  for (const LayerStats& layer : stats.layers) {
    saturated += layer.k_saturated + layer.v_saturated;
    nan += layer.k_nan + layer.v_nan;
    nb::dict row;
    row["scheme"] = layer.scheme;
    row["page_bytes"] = layer.page_bytes;
    row["k_scale"] = nb::cast(layer.k_scale);
    row["v_scale"] = nb::cast(layer.v_scale);
    row["k"] = Counts(layer.k_values, layer.k_saturated, layer.k_nan, layer.k_blocks, layer.k_zero_blocks);
    row["v"] = Counts(layer.v_values, layer.v_saturated, layer.v_nan, layer.v_blocks, layer.v_zero_blocks);
    layers.append(row);
  }
  result["saturated"] = saturated;
  result["nan"] = nan;
  result["layers"] = layers;
  return result;
}

}  // namespace kvanta::python
