// Statistics as plain dictionaries.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "kvanta/stats.h"

namespace kvanta::python {

// One dictionary per group.
nanobind::list GroupDicts(const std::vector<CacheGroupStats>& groups);
// (path, "gauge" or "counter", name, help, path of the condition) of every field that is a metric.
nanobind::list EngineMetrics();
nanobind::dict StatsDict(const EngineStats& stats);

}  // namespace kvanta::python
