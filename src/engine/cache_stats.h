// Layouts of caches in statistics and plans.
#pragma once

#include <vector>

#include "cache/kv_cache_spec.h"
#include "formats/scheme.h"
#include "kvanta/stats.h"

namespace kvanta::engine {

// The groups of a cache, without counts of pages.
std::vector<CacheGroupStats> DescribeGroups(const cache::KvCacheSpec& spec);

// The levels of a layer: one without precision by age.
std::vector<LayerLevel> DescribeLevels(const formats::LayerScheme& layer);

}  // namespace kvanta::engine
