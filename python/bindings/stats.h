// Statistics as plain dictionaries.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "kvanta/stats.h"

namespace kvanta::python {

// One dictionary per group.
nanobind::list GroupDicts(const std::vector<CacheGroupStats>& groups);
nanobind::dict StatsDict(const EngineStats& stats);

}  // namespace kvanta::python
