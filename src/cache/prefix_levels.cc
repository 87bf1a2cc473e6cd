// Precision by pressure in the prefix cache: levels of pages, demotion, events of hits.
#include <algorithm>

#include "base/clock.h"
#include "cache/prefix_tree.h"

namespace kvanta::cache {

int PrefixCache::State::LevelOf(const Node& node) const noexcept {
  int level = 0;
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    if (spec.groups[g].IsDemotable(node.index))
      level = std::max(level, static_cast<int>(cache::LevelOf(node.records[g])));
  }
  return level;
}

LevelEvents PrefixCache::State::EventsOf(std::span<Node* const> path) {
  LevelEvents events;
  for (const Node* node : path) events.insert(events.end(), node->events.begin(), node->events.end());
  return events;
}

std::vector<int> PrefixCache::State::LevelsAfter(std::span<Node* const> path) const {
  std::vector<int> levels;
  for (const Node* node : path) levels.push_back(LevelOf(*node));
  for (const LevelEvent& event : EventsOf(path)) {
    for (int64_t page = event.first_page; page < std::min(event.end_page, std::ssize(levels)); ++page) {
      levels[static_cast<size_t>(page)] = std::max(levels[static_cast<size_t>(page)], event.level);
    }
  }
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    const KvCacheGroup& group = spec.groups[g];
    for (int64_t page = group.FirstPage(std::ssize(path) * spec.page_size); page < std::ssize(path); ++page) {
      if (!group.IsDemotable(page)) continue;
      const int level = levels[static_cast<size_t>(page)];
      for (int each = level; each <= (level == 0 ? 0 : spec.floors); ++each) {
        if (path[static_cast<size_t>(page)]->records[g].Of(LevelKind(each)) == kNoPage) return {};
      }
    }
  }
  return levels;
}

LevelEvents PrefixCache::State::HitEvents(std::span<Node* const> path, std::span<const int> levels) const {
  LevelEvents events = EventsOf(path);
  std::vector<int> known(path.size(), 0);
  for (const LevelEvent& event : events) {
    for (int64_t page = event.first_page; page < std::min(event.end_page, std::ssize(path)); ++page) {
      known[static_cast<size_t>(page)] = std::max(known[static_cast<size_t>(page)], event.level);
    }
  }
  const int64_t position = std::ssize(path) * spec.page_size;
  for (int64_t page = 0; page < std::ssize(path); ++page) {
    const int level = levels[static_cast<size_t>(page)];
    const bool is_read = std::ranges::any_of(spec.groups, [&](const KvCacheGroup& group) {
      return group.IsDemotable(page) && page >= group.FirstPage(position);
    });
    if (is_read && level > known[static_cast<size_t>(page)]) {
      AddEvent(events, {.position = position, .first_page = page, .end_page = page + 1, .level = level});
    }
  }
  return events;
}

bool PrefixCache::State::IsUnusedBefore(const Node& node, int level) const noexcept {
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    for (int each = 0; spec.groups[g].IsDemotable(node.index) && each < level; ++each) {
      if (!IsUnused(static_cast<int>(g), LevelKind(each), node.records[g].Of(LevelKind(each)))) return false;
    }
  }
  return true;
}

void PrefixCache::State::DropLevelsBefore(Node& node, int level) noexcept {
  for (size_t g = 0; g < spec.groups.size(); ++g) {
    for (int each = 0; spec.groups[g].IsDemotable(node.index) && each < level; ++each) {
      Drop(node, static_cast<int>(g), LevelKind(each));
    }
  }
}

bool PrefixCache::State::Demote(Node& node, int level, const LevelEncoder& encode) {
  std::vector<PageRef> records = node.records;
  for (size_t g = 0; g < records.size(); ++g) {
    if (!spec.groups[g].IsDemotable(node.index)) records[g] = {};
  }
  const auto allocate = [&](int group, PageKind kind) {
    return pool.Allocate(group, kind, /*rank=*/0, /*from_reserve=*/true);
  };
  if (!EncodeLevels(pool, encode, spec.floors, records, level, allocate)) return false;
  for (size_t g = 0; g < records.size(); ++g) {
    for (const PageKind kind : kAgedKinds) {
      const PageId record = records[g].Of(kind);
      if (record == kNoPage || node.records[g].Of(kind) != kNoPage) continue;
      Attach(node, static_cast<int>(g), kind, record);
      pool.Release(static_cast<int>(g), kind, record);
    }
  }
  DropLevelsBefore(node, level);
  return true;
}

bool PrefixCache::DemoteOne(const LevelEncoder& encode) {
  State& state = *state_;
  bool any = false;  // many records are in use, when nothing can be demoted
  for (int g = 0; g < static_cast<int>(state.spec.groups.size()); ++g) {
    for (int level = 0; level < state.spec.groups[static_cast<size_t>(g)].ages.floors; ++level) {
      any = any || state.pool.EvictablePages(g, LevelKind(level)) > 0;
    }
  }
  if (!any) return false;
  state.ExpirePins(Now());
  for (const auto& [key, record] : state.demotable) {
    const int level = record.kind == PageKind::kQuantized ? 1 : static_cast<int>(AgeIndex(record.kind)) + 2;
    if (state.LevelOf(*record.node) + 1 != level || !state.IsUnusedBefore(*record.node, level)) continue;
    return state.Demote(*record.node, level, encode);
  }
  return false;
}

void PrefixCache::AttachLevels(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int level,
                               std::span<const PageRef> records, std::span<const LevelEvent> events) {
  State& state = *state_;
  int64_t found = 0;
  Node* node = state.Descend(tokens, salt, index + 1, found, &events);
  if (node == nullptr || found != index + 1) return;
  for (size_t g = 0; g < records.size(); ++g) {
    // A group that has lost the page has it at no level.
    if (!state.spec.groups[g].IsDemotable(index) || cache::HeldRecordOf(node->records[g]) == kNoPage) continue;
    for (const PageKind kind : kAgedKinds) {
      const PageId record = records[g].Of(kind);
      if (record != kNoPage && node->records[g].Of(kind) == kNoPage) {
        state.Attach(*node, static_cast<int>(g), kind, record);
      }
    }
  }
  if (state.IsUnusedBefore(*node, level)) state.DropLevelsBefore(*node, level);
}

}  // namespace kvanta::cache
