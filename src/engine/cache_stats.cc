#include "engine/cache_stats.h"

#include <fmt/format.h>

#include "formats/age_text.h"

namespace kvanta::engine {

std::vector<CacheGroupStats> DescribeGroups(const cache::KvCacheSpec& spec) {
  std::vector<CacheGroupStats> groups;
  for (const cache::KvCacheGroup& group : spec.groups) {
    std::string visibility = "full";
    if (group.IsRecurrent()) {
      visibility = "recurrent";
    } else if (!group.visibility.IsFull()) {
      const bool window = group.visibility.kind == cache::VisibilityKind::kSlidingWindow;
      visibility = fmt::format("{}={}", window ? "sliding_window" : "chunked", group.visibility.span);
    }
    const auto levels = static_cast<std::ptrdiff_t>(group.ages.Levels());
    groups.push_back({.visibility = std::move(visibility),
                      .layers = group.layers,
                      .page_bytes = group.page_bytes,
                      .exact_page_bytes = group.exact_page_bytes,
                      .level_page_bytes = {group.age_bytes.begin(), group.age_bytes.begin() + levels},
                      .level_pages_used = std::vector<int64_t>(group.ages.Levels())});
  }
  return groups;
}

std::vector<LayerLevel> DescribeLevels(const formats::LayerScheme& layer) {
  KvScheme first = layer.scheme;
  first.ages.clear();
  std::vector<LayerLevel> levels = {{first.ToString(), layer.bytes}};
  for (size_t i = 0; i < layer.ages.size(); ++i) {
    const KvAge& age = layer.scheme.ages[i];
    levels.push_back({formats::LevelText(age), layer.kv_heads * layer.ages[i].head_bytes});
  }
  return levels;
}

}  // namespace kvanta::engine
