// A figure of the engine's statistics as a metric of Prometheus.
#pragma once

#include <cstdint>

namespace kvanta {

enum class MetricKind : uint8_t { kNone, kGauge, kCounter };

struct Metric {
  MetricKind kind = MetricKind::kNone;
  const char* name = "";  // after the prefix "kvanta:"
  const char* help = "";
  const char* with = "";  // path of a field (EngineStats::VisitFields) without which, 0 or empty, there is no metric
};

}  // namespace kvanta
