#include "cache/kv_cache_spec.h"

#include <algorithm>
#include <limits>

#include "base/math.h"

namespace kvanta::cache {
namespace {

constexpr int64_t kMinSnapshotInterval = 8;  // pages

}  // namespace

KvCacheGroup::KvCacheGroup(const formats::CacheLayout& layout, int group, std::span<const Visibility> visibilities)
    : page_size(layout.page_size),
      page_bytes(layout.groups[static_cast<size_t>(group)].page_bytes),
      exact_page_bytes(layout.groups[static_cast<size_t>(group)].exact_page_bytes),
      quantized_from(std::numeric_limits<int>::max()) {
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const formats::LayerScheme& layer = layout.layers[i];
    if (layer.group != group) continue;
    const Visibility given = visibilities.empty() ? Visibility{} : visibilities[i];
    const Visibility sees = layer.IsRecurrent() ? kRecurrentVisibility : given;
    visibility = layers.empty() || visibility == sees ? sees : Visibility{};
    layers.push_back(static_cast<int>(i));
    if (layer.exact_open) {
      exact_while_open = true;
      exact_before = std::max(exact_before, layer.exact_pages - 1);
      sink_pages = std::max(sink_pages, layer.sink_pages);
      quantized_from = std::min(quantized_from, layer.sink_pages);
    } else {
      quantized_while_open = true;
    }
  }
}

int64_t KvCacheGroup::MaxBytes(int64_t tokens, int64_t step_pages) const noexcept {
  const int64_t pages = CeilDiv(tokens, page_size);
  // The state before a step and the one after it; snapshots are not reserved.
  // The coded state of a prefix hit, too.
  if (RoundsStates()) return page_bytes + (step_pages == 0 ? 0 : std::min<int64_t>(pages, 2) * exact_page_bytes);
  if (IsRecurrent()) return std::min<int64_t>(pages, 2) * page_bytes;
  // A window that begins inside a page spans one more page than its tokens fill.
  const int64_t held =
      visibility.IsFull() ? pages : std::min(pages, CeilDiv(visibility.span - 1, page_size) + 1 + step_pages);
  int64_t quantized = held;
  if (!quantized_while_open) quantized = std::clamp<int64_t>(tokens / page_size - quantized_from, 0, held);
  int64_t exact = 0;
  if (exact_while_open) {
    const int64_t sinks = std::min<int64_t>(pages, sink_pages);
    exact = std::min(held, sinks + std::min(pages - sinks, step_pages + exact_before));
  }
  return quantized * page_bytes + exact * exact_page_bytes;
}

KvCacheSpec::KvCacheSpec(const formats::CacheLayout& layout, std::span<const Visibility> layers)
    : page_size(layout.page_size) {
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    groups.emplace_back(layout, group, layers);
  }
  int64_t other_bytes = 0;
  for (const KvCacheGroup& group : groups) other_bytes += group.IsRecurrent() ? 0 : group.page_bytes;
  for (KvCacheGroup& group : groups) {
    if (group.IsRecurrent()) {
      group.state_grid = layout.state_grid / page_size;
      group.snapshot_interval =
          RoundUp(std::max(kMinSnapshotInterval, CeilDiv(group.page_bytes, std::max<int64_t>(other_bytes, 1))),
                  std::max<int64_t>(group.state_grid, 1));
    }
  }
}

int64_t KvCacheSpec::PageBytes() const noexcept {
  int64_t bytes = 0;
  for (const KvCacheGroup& group : groups) bytes += group.page_bytes;
  return bytes;
}

int64_t KvCacheSpec::MaxBytes(int64_t tokens, int64_t step_pages) const noexcept {
  int64_t bytes = 0;
  for (const KvCacheGroup& group : groups) bytes += group.MaxBytes(tokens, step_pages);
  return bytes;
}

int64_t KvCacheSpec::MinCacheBytes(int64_t tokens, int64_t step_pages) const noexcept {
  int64_t one_of_each = 0;
  for (const KvCacheGroup& group : groups) one_of_each += group.page_bytes + group.exact_page_bytes;
  return std::max(MaxBytes(tokens, step_pages), one_of_each);
}

std::vector<int> GroupLayers(std::span<const KvScheme> schemes, std::span<const Visibility> layers) {
  struct Key {
    Visibility visibility;
    ExactPages exact;
    int sinks;
    bool operator==(const Key&) const = default;
  };
  std::vector<Key> keys;
  std::vector<int> groups;
  for (size_t i = 0; i < schemes.size(); ++i) {
    const Key key{layers.empty() ? Visibility{} : layers[i], schemes[i].exact, schemes[i].sink_pages};
    const auto known = std::ranges::find(keys, key);
    groups.push_back(static_cast<int>(known - keys.begin()));
    if (known == keys.end()) keys.push_back(key);
  }
  return groups;
}

}  // namespace kvanta::cache
