// The radix tree of the prefix cache: nodes, orders of use, records. Included by the cache's own sources alone.
#pragma once

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/prefix_cache.h"
#include "cache/prefix_hit.h"

namespace kvanta::cache {

inline constexpr double kNoExpiry = std::numeric_limits<double>::infinity();
inline constexpr uint64_t kPinnedKey = uint64_t{1} << 63U;

// Hash of a page's token ids; selects the bucket only, lookups compare the ids.
inline uint64_t HashPage(std::span<const int32_t> tokens) {
  uint64_t hash = 0x9E3779B97F4A7C15ULL;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDULL;
    hash ^= hash >> 32;
  }
  return hash;
}

struct PrefixCache::Node {
  Node* parent = nullptr;  // nullptr for a root
  uint64_t hash = 0;       // hash of tokens
  int64_t index = 0;       // page number
  PageKey key = {};        // by the first listener, if there is one
  std::string salt;        // for a root
  std::vector<int32_t> tokens;
  LevelEvents events;               // of queries in this page
  bool is_reported = true;          // to listeners: neither this page nor one before it has events
  std::vector<PageRef> records;     // [group]
  std::vector<uint64_t> droppable;  // [group][kind]: key in State::droppable or State::demotable; 0: none
  uint64_t last_use = 0;            // key in State::leaves while it has no children
  double pinned_until = 0;          // on the clock of Now(), never after its parent's; 0: not pinned
  std::unordered_multimap<uint64_t, std::unique_ptr<Node>> children;

  // The child computed with these events.
  Node* Child(uint64_t child_hash, std::span<const int32_t> child_tokens,
              std::span<const LevelEvent> child_events) const {
    const auto [first, last] = children.equal_range(child_hash);
    for (auto it = first; it != last; ++it) {
      const Node& child = *it->second;
      if (std::ranges::equal(child.tokens, child_tokens) && std::ranges::equal(child.events, child_events)) {
        return it->second.get();
      }
    }
    return nullptr;
  }
  // The child without events or, if there is none, the one used last.
  Node* AnyChild(uint64_t child_hash, std::span<const int32_t> child_tokens) const {
    const auto [first, last] = children.equal_range(child_hash);
    Node* best = nullptr;
    for (auto it = first; it != last; ++it) {
      Node& child = *it->second;
      if (!std::ranges::equal(child.tokens, child_tokens)) continue;
      if (child.events.empty()) return &child;
      if (best == nullptr || child.last_use > best->last_use) best = &child;
    }
    return best;
  }
};

struct PrefixCache::State {
  // A record that can be evicted while its page stays in the tree.
  struct Droppable {
    Node* node = nullptr;
    int group = 0;
    PageKind kind = PageKind::kQuantized;
  };

  PagePool& pool;
  const KvCacheSpec spec;
  const Clock clock_of_pins;
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots = {};  // by salt
  // LRU orders, keyed by time of last use. A parent's last use is never before its children's.
  std::map<uint64_t, Node*> leaves = {};
  std::map<uint64_t, Droppable> droppable = {};
  std::map<uint64_t, Droppable> demotable = {};  // records above the floor
  uint64_t clock = 0;
  std::unordered_set<Node*> pinned = {};
  double next_expiry = kNoExpiry;  // no pin of `pinned` ends before it
  int64_t pinned_bytes = 0;
  int64_t nodes = 0;
  int64_t evictions = 0;
  std::vector<RecordListener*> listeners = {};

  std::span<const int32_t> Page(std::span<const int32_t> tokens, int64_t index) const {
    const int64_t size = spec.page_size;
    return tokens.subspan(static_cast<size_t>(index * size), static_cast<size_t>(size));
  }

  // Deepest node on the path of `tokens` below the root of `salt`, at most `depth` pages deep; nullptr without a root.
  // events: those that the pages were computed with; null: any.
  Node* Descend(std::span<const int32_t> tokens, std::string_view salt, int64_t depth, int64_t& reached,
                const std::span<const LevelEvent>* events) const {
    reached = 0;
    const auto root = roots.find(salt);
    if (root == roots.end()) return nullptr;
    Node* node = root->second.get();
    while (reached < depth) {
      const auto page = Page(tokens, reached);
      const uint64_t hash = HashPage(page);
      Node* child = events == nullptr ? node->AnyChild(hash, page)
                                      : node->Child(hash, page, EventsIn(*events, reached, spec.page_size));
      if (child == nullptr) break;
      node = child;
      ++reached;
    }
    return node;
  }

  // ---- order of use. Entries are re-keyed, so that nothing is allocated when something is used. Keys of pinned pages
  // come after all others.

  uint64_t NextKey(const Node& node) noexcept { return ++clock | (node.pinned_until > 0 ? kPinnedKey : 0); }

  template <class Map>
  static void Rekey(Map& map, uint64_t& key, uint64_t next) noexcept {
    auto entry = map.extract(key);
    entry.key() = key = next;
    map.insert(std::move(entry));
  }

  // From the leaf up, so that every parent ends up more recent than its children.
  void Touch(Node* node) noexcept {
    for (; node->parent != nullptr; node = node->parent) {
      if (node->children.empty()) {
        Rekey(leaves, node->last_use, NextKey(*node));
      } else {
        node->last_use = NextKey(*node);
      }
    }
  }

  // ---- pins

  int64_t Bytes(const Node& node) const {
    int64_t bytes = 0;
    VisitRecords(node, [&](int group, PageKind kind, PageId /*page*/) { bytes += pool.RecordBytes(group, kind); });
    return bytes;
  }

  // Ends the pins whose time is over.
  void ExpirePins(double now) noexcept;

  // True for the record of a level that demotion replaces.
  bool IsDemotable(const Node& node, int group, PageKind kind) const {
    const KvCacheGroup& of = spec.groups[static_cast<size_t>(group)];
    if (!of.IsDemotable(node.index) || kind == PageKind::kExact) return false;
    return kind == PageKind::kQuantized || static_cast<int>(AgeIndex(kind)) + 1 < of.ages.floors;
  }
  // Later levels by pressure, and pages that were computed after a demotion, are not for listeners.
  bool IsReported(const Node& node, int group, PageKind kind) const {
    return node.is_reported && !(IsAged(kind) && spec.groups[static_cast<size_t>(group)].ages.HasFloor());
  }
  std::map<uint64_t, Droppable>& MapOf(const Node& node, int group, PageKind kind) {
    return IsDemotable(node, group, kind) ? demotable : droppable;
  }

  // True for a record that may go before its page does.
  bool IsDroppable(const Node& node, int group, PageKind kind) const {
    return cache::IsDroppable(spec.groups[static_cast<size_t>(group)], node.index, kind);
  }

  static uint64_t& DroppableKey(Node& node, int group, PageKind kind) {
    return node.droppable[RecordIndex(group, kind)];
  }

  void TouchRecord(Node& node, int group, PageKind kind) noexcept {
    uint64_t& key = DroppableKey(node, group, kind);
    if (key != 0) Rekey(MapOf(node, group, kind), key, NextKey(node));
  }

  // ---- records

  // Calls visit(group, kind, page) for each record that the node has; visit may drop it.
  template <class Visit>
  static void VisitRecords(const Node& node, Visit visit) {
    for (size_t g = 0; g < node.records.size(); ++g) {
      for (const PageKind kind : kPageKinds) {
        const PageId page = node.records[g].Of(kind);
        if (page != kNoPage) visit(static_cast<int>(g), kind, page);
      }
    }
  }

  static CachedRecord Record(const Node& node, int group, PageKind kind) {
    const bool first = node.index == 0;
    return {.key = node.key,
            .parent = first ? nullptr : &node.parent->key,
            .salt = first ? std::string_view(node.parent->salt) : std::string_view(),
            .tokens = node.tokens,
            .index = node.index,
            .group = group,
            .kind = kind,
            .page = node.records[static_cast<size_t>(group)].Of(kind),
            .records = node.records[static_cast<size_t>(group)]};
  }

  void Report(void (RecordListener::*event)(const CachedRecord&) noexcept, const Node& node, int group,
              PageKind kind) const noexcept {
    if (!IsReported(node, group, kind)) return;
    for (RecordListener* listener : listeners) (listener->*event)(Record(node, group, kind));
  }

  void Attach(Node& node, int group, PageKind kind, PageId page) {
    if (IsDroppable(node, group, kind) || IsDemotable(node, group, kind)) {
      const uint64_t next = NextKey(node);
      MapOf(node, group, kind).emplace(next, Droppable{&node, group, kind});  // first, since it may throw
      DroppableKey(node, group, kind) = next;
    }
    if (node.pinned_until > 0) pinned_bytes += pool.RecordBytes(group, kind);
    pool.Retain(group, kind, page);
    pool.SetCached(group, kind, page, true);
    node.records[static_cast<size_t>(group)].Of(kind) = page;
    Report(&RecordListener::OnAttach, node, group, kind);
  }

  void Drop(Node& node, int group, PageKind kind) noexcept {
    PageId& page = node.records[static_cast<size_t>(group)].Of(kind);
    if (page == kNoPage) return;
    Report(&RecordListener::OnRelease, node, group, kind);
    pool.SetCached(group, kind, page, false);
    pool.Release(group, kind, page);
    page = kNoPage;
    if (node.pinned_until > 0) pinned_bytes -= pool.RecordBytes(group, kind);
    uint64_t& key = DroppableKey(node, group, kind);
    MapOf(node, group, kind).erase(key);
    key = 0;
  }

  bool IsUnused(int group, PageKind kind, PageId page) const {
    return page == kNoPage || pool.References(group, kind, page) == 1;
  }
  bool IsUnused(const Node& node) const {
    bool unused = true;
    VisitRecords(node, [&](int group, PageKind kind, PageId page) { unused = unused && IsUnused(group, kind, page); });
    return unused;
  }
  static bool IsEmpty(const Node& node) {
    return std::ranges::all_of(node.records, [](const PageRef& page) { return page == PageRef{}; });
  }

  // ---- precision by pressure (prefix_levels.cc)

  // Level at which a hit finds the page, that of all its groups.
  int LevelOf(const Node& node) const noexcept;
  // Kind of the record that a hit reads where it does not read the exact one.
  PageKind ReadKind(const Node& node, int group, int level) const noexcept {
    return spec.groups[static_cast<size_t>(group)].IsDemotable(node.index) ? LevelKind(level) : PageKind::kQuantized;
  }
  // True if nobody else holds a record of a level before `level`.
  bool IsUnusedBefore(const Node& node, int level) const noexcept;
  void DropLevelsBefore(Node& node, int level) noexcept;
  // False if memory is short.
  bool Demote(Node& node, int level, const LevelEncoder& encode);
  // The events of a path, by position.
  static LevelEvents EventsOf(std::span<Node* const> path);
  // The events of a hit at the end of `path`, whose pages are read at `levels`.
  LevelEvents HitEvents(std::span<Node* const> path, std::span<const int> levels) const;
  // The first record of `records` that may go before its page does and that nobody uses, and its key; a null node:
  // none.
  std::pair<uint64_t, Droppable> FirstDroppable(const std::map<uint64_t, Droppable>& records) const {
    for (const auto& [use, at] : records) {
      if (!IsDroppable(*at.node, at.group, at.kind)) continue;
      if (IsUnused(at.group, at.kind, at.node->records[static_cast<size_t>(at.group)].Of(at.kind))) return {use, at};
    }
    return {std::numeric_limits<uint64_t>::max(), {}};
  }
  // Drops a record without which hits elsewhere can do, and those of other levels of its page in this group: so all
  // groups that have a page have it at the same levels.
  void DropDroppable(const Droppable& record) noexcept {
    Drop(*record.node, record.group, record.kind);
    if (record.kind == PageKind::kExact || !spec.groups[static_cast<size_t>(record.group)].ages.HasFloor()) return;
    for (int level = 0; level <= spec.floors; ++level) Drop(*record.node, record.group, LevelKind(level));
  }
  // Level at which queries after the hit `path` read each page, [page]; empty if some record of them is missing.
  std::vector<int> LevelsAfter(std::span<Node* const> path) const;

  // Removes a leaf and those of its ancestors that then have neither records nor children.
  void Remove(Node* leaf) noexcept {
    auto entry = leaves.extract(leaf->last_use);
    for (;;) {
      VisitRecords(*leaf, [&](int group, PageKind kind, PageId /*page*/) { Drop(*leaf, group, kind); });
      pinned.erase(leaf);
      --nodes;
      Node* parent = leaf->parent;
      const auto [first, last] = parent->children.equal_range(leaf->hash);
      parent->children.erase(std::find_if(first, last, [&](const auto& child) { return child.second.get() == leaf; }));
      if (!parent->children.empty()) return;
      if (parent->parent == nullptr) {
        roots.erase(roots.find(parent->salt));
        return;
      }
      leaf = parent;
      if (!IsEmpty(*leaf)) break;
    }
    entry.key() = leaf->last_use;
    entry.mapped() = leaf;
    leaves.insert(std::move(entry));
  }
};

}  // namespace kvanta::cache
