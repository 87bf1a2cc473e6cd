#include "cache/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "cache/prefix_hit.h"
#include "cache/prefix_tree.h"

namespace kvanta::cache {

PrefixCache::PrefixCache(PagePool& pool, const KvCacheSpec& spec, Clock now)
    : state_(new State{.pool = pool, .spec = spec, .clock_of_pins = std::move(now)}) {}

PrefixCache::~PrefixCache() {
  // Removes from the leaves up; destroying a chain from its root would recurse once per page.
  while (!state_->leaves.empty()) state_->Remove(state_->leaves.begin()->second);
}

PrefixCache::Prefix PrefixCache::Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages) {
  State& state = *state_;
  max_pages = std::min<int64_t>(max_pages, static_cast<int64_t>(tokens.size()) / state.spec.page_size);
  Prefix prefix;
  prefix.records.resize(state.spec.groups.size());
  Node* node = state.Descend(tokens, salt, max_pages, prefix.known, nullptr);
  if (prefix.known == 0) return prefix;
  std::vector<Node*> path(static_cast<size_t>(prefix.known));
  for (auto at = path.rbegin(); at != path.rend(); ++at, node = node->parent) *at = node;
  const auto has = [&](int64_t page, int group, PageKind kind) {
    const Node& at = *path[static_cast<size_t>(page)];
    if (kind == PageKind::kQuantized) kind = state.ReadKind(at, group, state.LevelOf(at));
    return at.records[static_cast<size_t>(group)].Of(kind) != kNoPage;
  };
  prefix.pages = LongestHit(state.spec, prefix.known, has);
  std::vector<int> levels;  // [page], with precision by pressure
  if (state.spec.floors != 0) {
    const auto read = [&] { return std::span(path).first(static_cast<size_t>(prefix.pages)); };
    while (prefix.pages > 0 && (levels = state.LevelsAfter(read())).empty()) {
      prefix.pages = LongestHit(state.spec, prefix.pages - 1, has);
    }
    prefix.events = state.HitEvents(read(), levels);
  }
  if (prefix.pages == 0) return prefix;
  for (BlockTable& table : prefix.records) table.resize(static_cast<size_t>(prefix.pages));
  // Nothing throws from here on.
  state.Touch(path[static_cast<size_t>(prefix.pages - 1)]);
  for (size_t g = 0; g < state.spec.groups.size(); ++g) {
    const KvCacheGroup& group = state.spec.groups[g];
    BlockTable& table = prefix.records[g];
    for (int64_t page = group.FirstPage(prefix.pages * state.spec.page_size); page < prefix.pages; ++page) {
      for (const PageKind kind : kPageKinds) {
        const PageId id = path[static_cast<size_t>(page)]->records[g].Of(kind);
        const bool is_read = kind != PageKind::kExact && group.IsDemotable(page)
                                 ? IsOfLevel(kind, levels[static_cast<size_t>(page)])
                                 : ReadsAfterHit(group, page, prefix.pages, kind);
        if (id == kNoPage || !is_read) continue;
        state.pool.Retain(static_cast<int>(g), kind, id);
        table[static_cast<size_t>(page)].Of(kind) = id;
        state.TouchRecord(*path[static_cast<size_t>(page)], static_cast<int>(g), kind);
        state.Report(&RecordListener::OnUse, *path[static_cast<size_t>(page)], static_cast<int>(g), kind);
      }
    }
  }
  return prefix;
}

bool PrefixCache::Insert(std::span<const int32_t> tokens, std::string_view salt, int64_t index,
                         std::span<PageRef> records, std::span<const LevelEvent> events) {
  State& state = *state_;
  if (index == 0 && !state.roots.contains(salt)) {
    auto root = std::make_unique<Node>();
    root->salt = salt;
    if (!state.listeners.empty()) root->key = state.listeners.front()->RootKey(salt);
    state.roots.emplace(salt, std::move(root));
  }
  int64_t found = 0;
  Node* parent = state.Descend(tokens, salt, index, found, &events);
  if (parent == nullptr || found != index) return false;
  const auto key = state.Page(tokens, index);
  const uint64_t hash = HashPage(key);
  const std::span<const LevelEvent> own_events = EventsIn(events, index, state.spec.page_size);
  Node* node = parent->Child(hash, key, own_events);
  if (node == nullptr) {
    auto fresh = std::make_unique<Node>();
    fresh->parent = parent;
    fresh->hash = hash;
    fresh->index = index;
    fresh->tokens.assign(key.begin(), key.end());
    fresh->events.assign(own_events.begin(), own_events.end());
    fresh->is_reported = parent->is_reported && own_events.empty();
    if (!state.listeners.empty() && fresh->is_reported)
      fresh->key = state.listeners.front()->ChildKey(parent->key, key);
    fresh->records.resize(records.size());
    fresh->droppable.resize(std::size(kPageKinds) * records.size());
    // Operations that may throw come first. A parent that was a leaf passes its entry on.
    const bool parent_was_leaf = parent->parent != nullptr && parent->children.empty();
    std::map<uint64_t, Node*> entries;
    if (!parent_was_leaf) entries.emplace(0, nullptr);
    node = parent->children.emplace(hash, std::move(fresh))->second.get();
    auto entry = parent_was_leaf ? state.leaves.extract(parent->last_use) : entries.extract(entries.begin());
    entry.key() = node->last_use = state.NextKey(*node);
    entry.mapped() = node;
    state.leaves.insert(std::move(entry));
    ++state.nodes;
  }
  state.Touch(node);
  for (size_t g = 0; g < records.size(); ++g) {
    const int group = static_cast<int>(g);
    for (const PageKind kind : kPageKinds) {
      PageId& ours = records[g].Of(kind);
      const PageId cached = node->records[g].Of(kind);
      if (cached != kNoPage) {
        ours = cached;
        state.TouchRecord(*node, group, kind);
      } else if (ours != kNoPage) {
        state.Attach(*node, group, kind, ours);
      }
    }
  }
  return true;
}

void PrefixCache::AttachExact(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group,
                              PageId exact, std::span<const LevelEvent> events) {
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, index + 1, found, &events);
  if (found != index + 1 || node->records[static_cast<size_t>(group)].exact != kNoPage) return;
  state_->Attach(*node, group, PageKind::kExact, exact);
}

void PrefixCache::DropRecord(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group,
                             PageId page, std::span<const LevelEvent> events) noexcept {
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, index + 1, found, &events);
  if (found != index + 1 || node->records[static_cast<size_t>(group)].quantized != page) return;
  if (!state_->IsUnused(group, PageKind::kQuantized, page)) return;
  state_->Report(&RecordListener::OnDrop, *node, group, PageKind::kQuantized);
  state_->Drop(*node, group, PageKind::kQuantized);
}

std::span<const PageRef> PrefixCache::Peek(std::span<const int32_t> tokens, std::string_view salt, int64_t index,
                                           std::span<const LevelEvent> events) const {
  if (index < 0 || (index + 1) * state_->spec.page_size > static_cast<int64_t>(tokens.size())) return {};
  int64_t found = 0;
  const Node* node = state_->Descend(tokens, salt, index + 1, found, &events);
  if (found != index + 1) return {};
  return node->records;
}

int64_t PrefixCache::Present(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                             std::vector<uint8_t>& present) const {
  const KvCacheSpec& spec = state_->spec;
  present.assign(RecordIndex(spec, max_pages, 0, PageKind::kQuantized), 0);
  int64_t known = 0;
  const Node* node = state_->Descend(tokens, salt, max_pages, known, nullptr);
  for (int64_t page = known - 1; page >= 0; --page, node = node->parent) {
    State::VisitRecords(*node, [&](int group, PageKind kind, PageId /*id*/) {
      const bool by_pressure = IsAged(kind) && spec.groups[static_cast<size_t>(group)].ages.HasFloor();
      present[RecordIndex(spec, page, group, by_pressure ? PageKind::kQuantized : kind)] = 1;
    });
  }
  return known;
}

void PrefixCache::AddListener(RecordListener& listener) {
  state_->listeners.push_back(&listener);
}

void PrefixCache::RemoveListener(RecordListener& listener) noexcept {
  std::erase(state_->listeners, &listener);
}

void PrefixCache::VisitRecords(const std::function<void(const CachedRecord&)>& visit) const {
  std::vector<const Node*> open;  // a stack: a long path would recurse once per page
  for (const auto& [salt, root] : state_->roots) open.push_back(root.get());
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& [hash, child] : node->children) open.push_back(child.get());
    if (node->parent == nullptr) continue;
    State::VisitRecords(*node, [&](int group, PageKind kind, PageId /*page*/) {
      if (state_->IsReported(*node, group, kind)) visit(State::Record(*node, group, kind));
    });
  }
}

bool PrefixCache::EvictOne() {
  State& state = *state_;
  state.ExpirePins(state.clock_of_pins());
  // The loops skip few entries: running sequences reference their own last pages or recently used ones.
  auto leaf = state.leaves.begin();
  while (leaf != state.leaves.end() && !state.IsUnused(*leaf->second)) ++leaf;
  const auto [use, at] = std::min(state.FirstDroppable(state.droppable), state.FirstDroppable(state.demotable),
                                  [](const auto& a, const auto& b) { return a.first < b.first; });
  if (at.node != nullptr && (leaf == state.leaves.end() || use < leaf->first)) {
    state.DropDroppable(at);
    if (at.node->children.empty() && State::IsEmpty(*at.node)) state.Remove(at.node);
  } else if (leaf != state.leaves.end()) {
    state.Remove(leaf->second);
  } else {
    return false;
  }
  ++state.evictions;
  return true;
}

int64_t PrefixCache::Pages() const noexcept {
  return state_->nodes;
}

int64_t PrefixCache::Evictions() const noexcept {
  return state_->evictions;
}

void PrefixCache::Clear() {
  State& state = *state_;
  for (auto* records : {&state.droppable, &state.demotable}) {
    for (auto at = records->begin(); at != records->end();) {
      const State::Droppable record = (at++)->second;
      const PageId page = record.node->records[static_cast<size_t>(record.group)].Of(record.kind);
      if (!state.IsDroppable(*record.node, record.group, record.kind)) continue;
      if (state.IsUnused(record.group, record.kind, page)) state.Drop(*record.node, record.group, record.kind);
    }
  }
  // Removing a leaf may turn its parent, whose last use is later, into a leaf.
  for (auto at = state.leaves.begin(); at != state.leaves.end();) {
    const uint64_t use = at->first;
    if (state.IsUnused(*at->second)) state.Remove(at->second);
    at = state.leaves.upper_bound(use);
  }
}

}  // namespace kvanta::cache
