// Statistics as plain dictionaries, for logs and --json.
#include "stats.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

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

nb::dict Counts(int64_t values, int64_t saturated, int64_t nan, int64_t blocks, int64_t zero_blocks) {
  nb::dict counts;
  counts["values"] = values;
  counts["saturated"] = saturated;
  counts["nan"] = nan;
  counts["blocks"] = blocks;
  counts["zero_blocks"] = zero_blocks;
  return counts;
}

// Sets a value by its path; a part after a dot lies in a dictionary of its own.
void SetField(nb::dict& stats, std::string_view path, nb::object value) {
  const size_t dot = path.find('.');
  const nb::str name(path.data(), std::min(dot, path.size()));
  if (dot == std::string_view::npos) {
    stats[name] = std::move(value);
    return;
  }
  if (!stats.contains(name)) stats[name] = nb::dict();
  nb::dict part = nb::cast<nb::dict>(stats[name]);
  SetField(part, path.substr(dot + 1), std::move(value));
}

}  // namespace

nb::list EngineMetrics() {
  nb::list metrics;
  EngineStats::VisitFields([&](const char* path, const auto& /*get*/, const Metric& metric) {
    if (metric.kind == MetricKind::kNone) return;
    const char* kind = metric.kind == MetricKind::kGauge ? "gauge" : "counter";
    metrics.append(nb::make_tuple(path, kind, metric.name, metric.help, metric.with));
  });
  return metrics;
}

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
    row["level_page_bytes"] = nb::cast(group.level_page_bytes);
    row["level_pages_used"] = nb::cast(group.level_pages_used);
    rows.append(row);
  }
  return rows;
}

nb::dict StatsDict(const EngineStats& stats) {
  nb::dict result;
  EngineStats::VisitFields([&](std::string_view path, const auto& get, const Metric&) {
    SetField(result, path, nb::cast(std::invoke(get, stats)));
  });
  nb::list step_tokens;  // (upper bound, steps)
  for (size_t i = 0; i < stats.step_tokens.size(); ++i) {
    const bool last = i == kStepTokenBounds.size();
    const double bound = last ? std::numeric_limits<double>::infinity() : static_cast<double>(kStepTokenBounds[i]);
    step_tokens.append(nb::make_tuple(bound, stats.step_tokens[i]));
  }
  result["step_tokens"] = step_tokens;
  result["groups"] = GroupDicts(stats.groups);
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
  int64_t saturated = 0;
  int64_t nan = 0;
  nb::list layers;
  for (const LayerStats& layer : stats.layers) {
    saturated += layer.k_saturated + layer.v_saturated;
    nan += layer.k_nan + layer.v_nan;
    nb::dict row;
    row["scheme"] = layer.scheme;
    row["page_bytes"] = layer.page_bytes;
    nb::list levels;
    for (const LayerLevel& level : layer.levels) {
      nb::dict entry;
      entry["scheme"] = level.scheme;
      entry["page_bytes"] = level.page_bytes;
      levels.append(entry);
    }
    row["levels"] = levels;
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
