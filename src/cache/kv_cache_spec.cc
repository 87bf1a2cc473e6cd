#include "cache/kv_cache_spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/math.h"
#include "kvanta/error.h"

namespace kvanta::cache {
namespace {

constexpr int64_t kMinSnapshotInterval = 8;  // pages

}  // namespace

AgeRule AgesOf(const formats::LayerScheme& layer) noexcept {
  AgeRule rule{.ageless = layer.ageless_pages};
  if (layer.scheme.HasFloor()) {
    rule.floors = static_cast<int32_t>(layer.ages.size());
  } else {
    for (size_t i = 0; i < layer.ages.size(); ++i) rule.pages[i] = layer.ages[i].pages;
  }
  return rule;
}

KvCacheGroup::KvCacheGroup(const formats::CacheLayout& layout, int group, std::span<const Visibility> visibilities,
                           int of_ranks)
    : page_size(layout.page_size),
      ranks(of_ranks),
      page_bytes(layout.groups[static_cast<size_t>(group)].page_bytes),
      exact_page_bytes(layout.groups[static_cast<size_t>(group)].exact_page_bytes),
      quantized_from(std::numeric_limits<int>::max()),
      age_bytes(layout.groups[static_cast<size_t>(group)].age_bytes) {
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const formats::LayerScheme& layer = layout.layers[i];
    if (layer.group != group) continue;
    if (!layer.ReadsAllPages()) ranks = 1;
    const Visibility given = visibilities.empty() ? Visibility{} : visibilities[i];
    const Visibility sees = layer.IsRecurrent() ? kRecurrentVisibility : given;
    visibility = layers.empty() || visibility == sees ? sees : Visibility{};
    const AgeRule own = AgesOf(layer);
    if (!layers.empty() && own != ages) {
      throw InputError(
          fmt::format("layers {} and {} of KV cache group {} have different ages: {} and {}", layers.front(), i, group,
                      layout.layers[static_cast<size_t>(layers.front())].scheme.ToString(), layer.scheme.ToString()));
    }
    ages = own;
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

double KvCacheGroup::MeanPageBytes(int64_t tokens) const noexcept {
  if (!ages.IsUsed()) return static_cast<double>(page_bytes);
  const int64_t visible = visibility.IsFull() ? tokens : std::min<int64_t>(tokens, visibility.span);
  const int64_t pages = std::max<int64_t>(1, CeilDiv(visible, page_size));
  const int64_t young = std::min<int64_t>(pages, (visibility.IsFull() ? ages.ageless : 0) + ages.pages[0]);
  const int64_t aged = pages - young;
  int64_t bytes = young * page_bytes;
  for (size_t age = 0; age < ages.Levels(); ++age) {
    const bool is_last = age + 1 == ages.Levels();
    bytes += (is_last ? aged : std::min<int64_t>(aged, ages.pages[age + 1] - ages.pages[age])) * age_bytes[age];
  }
  return static_cast<double>(bytes) / static_cast<double>(pages);
}

int64_t KvCacheGroup::MaxBytes(int64_t tokens, int64_t step_pages) const noexcept {
  const int64_t bytes = MaxFirstLevelBytes(tokens, step_pages);
  if (!ages.HasFloor()) return bytes;
  // Pages that a step closes are demoted after it.
  const int64_t first_level =
      std::max<int64_t>(ages.ageless, quantized_while_open ? 0 : quantized_from) + step_pages + 1;
  const int64_t reserve = age_bytes[0] + age_bytes[1];
  return bytes + reserve -
         std::max<int64_t>(0, HeldPages(tokens, step_pages) - first_level) * (page_bytes - FloorBytes());
}

// Pages of which a sequence has records. A window that begins inside a page spans one more page than its tokens fill.
int64_t KvCacheGroup::HeldPages(int64_t tokens, int64_t step_pages) const noexcept {
  const int64_t pages = CeilDiv(tokens, page_size);
  if (visibility.IsFull()) return pages;
  return std::min(pages, CeilDiv(visibility.span - 1, page_size) + 1 + step_pages);
}

int64_t KvCacheGroup::MaxFirstLevelBytes(int64_t tokens, int64_t step_pages) const noexcept {
  const int64_t pages = CeilDiv(tokens, page_size);
  // The state before a step and the one after it; snapshots are not reserved.
  // The coded state of a prefix hit, too.
  if (RoundsStates()) return page_bytes + (step_pages == 0 ? 0 : std::min<int64_t>(pages, 2) * exact_page_bytes);
  if (IsRecurrent()) return std::min<int64_t>(pages, 2) * page_bytes;
  const int64_t held = HeldPages(tokens, step_pages);
  int64_t quantized = held;
  if (!quantized_while_open) quantized = std::clamp<int64_t>(tokens / page_size - quantized_from, 0, held);
  int64_t exact = 0;
  const auto of_rank = [this](int64_t consecutive) { return CeilDiv(consecutive, int64_t{ranks}); };
  if (exact_while_open) {
    const int64_t sinks = std::min<int64_t>(pages, sink_pages);
    exact = std::min(of_rank(held), of_rank(sinks) + of_rank(std::min(pages - sinks, step_pages + exact_before)));
  }
  int64_t bytes = of_rank(quantized) * page_bytes + exact * exact_page_bytes;
  if (!ages.IsUsed()) return bytes;
  const int64_t ageless = std::min<int64_t>(pages, ages.ageless);
  bytes -= std::max<int64_t>(0, quantized - (ageless + ages.pages[0] + step_pages)) * page_bytes;
  const int64_t aged = std::clamp<int64_t>(held - ages.pages[0] - (visibility.IsFull() ? ageless : 0), 0, held);
  for (size_t age = 0; age < ages.Levels(); ++age) {
    if (!visibility.IsFull() && visibility.span <= int64_t{ages.pages[age] - 1} * page_size) continue;
    const bool is_last = age + 1 == ages.Levels();
    bytes += (is_last ? aged : std::min(aged, ages.pages[age + 1] - ages.pages[0] + step_pages)) * age_bytes[age];
  }
  return bytes;
}

KvCacheSpec::KvCacheSpec(const formats::CacheLayout& layout, std::span<const Visibility> layers, int of_ranks)
    : page_size(layout.page_size), ranks(of_ranks) {
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    groups.emplace_back(layout, group, layers, ranks);
  }
  for (const KvCacheGroup& group : groups) {
    if (floors != 0 && group.ages.HasFloor() && group.ages.floors != floors) {
      throw InputError(
          fmt::format("some layers have {} levels below the first one, and others {}", floors, group.ages.floors));
    }
    floors = std::max(floors, group.ages.floors);
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
  for (const KvCacheGroup& group : groups) {
    bytes += group.page_bytes;
    for (const int64_t of_level : group.age_bytes) bytes += of_level;
  }
  return bytes;
}

double KvCacheSpec::BytesPerToken(int64_t tokens) const noexcept {
  double bytes = 0;
  for (const KvCacheGroup& group : groups) {
    bytes += group.IsRecurrent() ? 0 : group.MeanPageBytes(tokens) / group.ranks;
  }
  return bytes / page_size;
}

double KvCacheSpec::FloorBytesPerToken() const noexcept {
  int64_t bytes = 0;
  for (const KvCacheGroup& group : groups) bytes += group.IsRecurrent() ? 0 : group.FloorBytes();
  return floors == 0 ? 0 : static_cast<double>(bytes) / page_size;
}

int64_t KvCacheSpec::MaxBytes(int64_t tokens, int64_t step_pages) const noexcept {
  int64_t bytes = 0;
  for (const KvCacheGroup& group : groups) bytes += group.MaxBytes(tokens, step_pages);
  return bytes;
}

int64_t KvCacheSpec::MaxFirstLevelBytes(int64_t tokens, int64_t step_pages) const noexcept {
  int64_t bytes = 0;
  for (const KvCacheGroup& group : groups) bytes += group.MaxFirstLevelBytes(tokens, step_pages);
  return bytes;
}

int64_t KvCacheSpec::MinCacheBytes(int64_t tokens, int64_t step_pages) const noexcept {
  int64_t one_of_each = 0;
  for (const KvCacheGroup& group : groups) {
    one_of_each += group.page_bytes + group.exact_page_bytes;
    for (const int64_t bytes : group.age_bytes) one_of_each += bytes;
  }
  return std::max(MaxBytes(tokens, step_pages), one_of_each);
}

std::vector<int> GroupLayers(std::span<const KvScheme> schemes, std::span<const Visibility> layers) {
  const auto same_age = [](const KvAge& a, const KvAge& b) {
    return a.tokens == b.tokens && a.sink_pages == b.sink_pages;
  };
  const auto same_group = [&](size_t i, size_t j) {
    const KvScheme &a = schemes[i], &b = schemes[j];
    return (layers.empty() || layers[i] == layers[j]) && a.exact == b.exact && a.sink_pages == b.sink_pages &&
           std::ranges::equal(a.ages, b.ages, same_age);
  };
  std::vector<size_t> first_layers;  // of each group
  std::vector<int> groups;
  for (size_t i = 0; i < schemes.size(); ++i) {
    const auto known = std::ranges::find_if(first_layers, [&](size_t first) { return same_group(i, first); });
    groups.push_back(static_cast<int>(known - first_layers.begin()));
    if (known == first_layers.end()) first_layers.push_back(i);
  }
  return groups;
}

}  // namespace kvanta::cache
