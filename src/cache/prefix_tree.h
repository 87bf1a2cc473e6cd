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
  std::vector<PageRef> records;     // [group]
  std::vector<uint64_t> droppable;  // [group][kind]: key in State::droppable; 0: none
  uint64_t last_use = 0;            // key in State::leaves while it has no children
  double pinned_until = 0;          // on the clock of Now(), never after its parent's; 0: not pinned
  std::unordered_multimap<uint64_t, std::unique_ptr<Node>> children;

  Node* Child(uint64_t child_hash, std::span<const int32_t> child_tokens) const {
    const auto [first, last] = children.equal_range(child_hash);
    for (auto it = first; it != last; ++it) {
      if (std::ranges::equal(it->second->tokens, child_tokens)) return it->second.get();
    }
    return nullptr;
  }
};

struct PrefixCache::State {
  // A record that can be evicted while its page stays in the tree.
  struct Droppable {
    Node* node;
    int group;
    PageKind kind;
  };

  PagePool& pool;
  const KvCacheSpec spec;
  const Clock clock_of_pins;
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots = {};  // by salt
  // LRU orders, keyed by time of last use. A parent's last use is never before its children's.
  std::map<uint64_t, Node*> leaves = {};
  std::map<uint64_t, Droppable> droppable = {};
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
  Node* Descend(std::span<const int32_t> tokens, std::string_view salt, int64_t depth, int64_t& reached) const {
    reached = 0;
    const auto root = roots.find(salt);
    if (root == roots.end()) return nullptr;
    Node* node = root->second.get();
    while (reached < depth) {
      const auto page = Page(tokens, reached);
      Node* child = node->Child(HashPage(page), page);
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

  // True for a record that may go before its page does.
  bool IsDroppable(const Node& node, int group, PageKind kind) const {
    return cache::IsDroppable(spec.groups[static_cast<size_t>(group)], node.index, kind);
  }

  static uint64_t& DroppableKey(Node& node, int group, PageKind kind) {
    return node.droppable[RecordIndex(group, kind)];
  }

  void TouchRecord(Node& node, int group, PageKind kind) noexcept {
    uint64_t& key = DroppableKey(node, group, kind);
    if (key != 0) Rekey(droppable, key, NextKey(node));
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
    for (RecordListener* listener : listeners) (listener->*event)(Record(node, group, kind));
  }

  void Attach(Node& node, int group, PageKind kind, PageId page) {
    if (IsDroppable(node, group, kind)) {
      const uint64_t next = NextKey(node);
      droppable.emplace(next, Droppable{&node, group, kind});  // first, since it may throw
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
    droppable.erase(key);
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
