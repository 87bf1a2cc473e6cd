#include "cache/prefix_cache.h"

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>

#include "cache/prefix_hit.h"

namespace kvanta::cache {
namespace {

// Hash of a page's token ids; selects the bucket only, lookups compare the ids.
uint64_t HashPage(std::span<const int32_t> tokens) {
  uint64_t hash = 0x9E3779B97F4A7C15ULL;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

struct PrefixCache::Node {
  Node* parent = nullptr;  // nullptr for a root
  uint64_t hash = 0;       // hash of tokens
  int64_t index = 0;       // page number
  PageKey key = {};        // by the listener, if there is one
  std::string salt;        // for a root
  std::vector<int32_t> tokens;
  std::vector<PageRef> records;     // [group]
  std::vector<uint64_t> droppable;  // [group][kind]: key in State::droppable; 0: none
  uint64_t last_use = 0;            // key in State::leaves while it has no children
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
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots = {};  // by salt
  // LRU orders, keyed by time of last use. A parent's last use is never before its children's.
  std::map<uint64_t, Node*> leaves = {};
  std::map<uint64_t, Droppable> droppable = {};
  uint64_t clock = 0;
  int64_t nodes = 0;
  int64_t evictions = 0;
  RecordListener* listener = nullptr;

  int Groups() const { return static_cast<int>(spec.groups.size()); }

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

  // ---- order of use. Entries are re-keyed, so that nothing is allocated when something is used.

  template <class Map>
  void Rekey(Map& map, uint64_t& key) noexcept {
    auto entry = map.extract(key);
    entry.key() = key = ++clock;
    map.insert(std::move(entry));
  }

  // From the leaf up, so that every parent ends up more recent than its children.
  void Touch(Node* node) noexcept {
    for (; node->parent != nullptr; node = node->parent) {
      if (node->children.empty()) {
        Rekey(leaves, node->last_use);
      } else {
        node->last_use = ++clock;
      }
    }
  }

  // A record may go before its page does where hits elsewhere can do without it: outside a window, or an exact copy
  // that only a hit which ends here reads.
  bool IsDroppable(const Node& node, int group, PageKind kind) const {
    const KvCacheGroup& of = spec.groups[static_cast<size_t>(group)];
    return !of.visibility.IsFull() || (kind == PageKind::kExact && node.index >= of.sink_pages);
  }

  static uint64_t& DroppableKey(Node& node, int group, PageKind kind) {
    return node.droppable[2 * static_cast<size_t>(group) + KindIndex(kind)];
  }

  void TouchRecord(Node& node, int group, PageKind kind) noexcept {
    uint64_t& key = DroppableKey(node, group, kind);
    if (key != 0) Rekey(droppable, key);
  }

  // ---- records

  void Report(void (RecordListener::*event)(const CachedRecord&) noexcept, const Node& node, int group,
              PageKind kind) const noexcept {
    if (listener == nullptr) return;
    const PageId page = node.records[static_cast<size_t>(group)].Of(kind);
    (listener->*event)({node.key, node.tokens, node.index, group, kind, page});
  }

  void Attach(Node& node, int group, PageKind kind, PageId page) {
    if (IsDroppable(node, group, kind)) {
      droppable.emplace(clock + 1, Droppable{&node, group, kind});  // first, since it may throw
      DroppableKey(node, group, kind) = ++clock;
    }
    pool.Retain(group, kind, page);
    pool.SetCached(group, kind, page, true);
    node.records[static_cast<size_t>(group)].Of(kind) = page;
    Report(&RecordListener::OnAttach, node, group, kind);
  }

  void Drop(Node& node, int group, PageKind kind) noexcept {
    PageId& page = node.records[static_cast<size_t>(group)].Of(kind);
    if (page == kNoPage) return;
    pool.SetCached(group, kind, page, false);
    pool.Release(group, kind, page);
    page = kNoPage;
    uint64_t& key = DroppableKey(node, group, kind);
    droppable.erase(key);
    key = 0;
  }

  bool IsUnused(int group, PageKind kind, PageId page) const {
    return page == kNoPage || pool.References(group, kind, page) == 1;
  }
  bool IsUnused(const Node& node) const {
    for (int group = 0; group < Groups(); ++group) {
      for (const PageKind kind : kPageKinds) {
        if (!IsUnused(group, kind, node.records[static_cast<size_t>(group)].Of(kind))) return false;
      }
    }
    return true;
  }
  static bool IsEmpty(const Node& node) {
    return std::ranges::all_of(node.records, [](const PageRef& page) { return page == PageRef{}; });
  }

  // Removes a leaf and those of its ancestors that then have neither records nor children.
  void Remove(Node* leaf) noexcept {
    auto entry = leaves.extract(leaf->last_use);
    for (;;) {
      for (int group = 0; group < Groups(); ++group) {
        for (const PageKind kind : kPageKinds) Drop(*leaf, group, kind);
      }
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

PrefixCache::PrefixCache(PagePool& pool, const KvCacheSpec& spec) : state_(new State{.pool = pool, .spec = spec}) {}

PrefixCache::~PrefixCache() {
  // Removes from the leaves up; destroying a chain from its root would recurse once per page.
  while (!state_->leaves.empty()) state_->Remove(state_->leaves.begin()->second);
}

PrefixCache::Prefix PrefixCache::Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages) {
  State& state = *state_;
  max_pages = std::min<int64_t>(max_pages, static_cast<int64_t>(tokens.size()) / state.spec.page_size);
  Prefix prefix;
  prefix.records.resize(state.spec.groups.size());
  Node* node = state.Descend(tokens, salt, max_pages, prefix.known);
  if (prefix.known == 0) return prefix;
  std::vector<Node*> path(static_cast<size_t>(prefix.known));
  for (auto at = path.rbegin(); at != path.rend(); ++at, node = node->parent) *at = node;
  prefix.pages = LongestHit(state.spec, prefix.known, [&](int64_t page, int group, PageKind kind) {
    return path[static_cast<size_t>(page)]->records[static_cast<size_t>(group)].Of(kind) != kNoPage;
  });
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
        if (id == kNoPage || !ReadsAfterHit(group, page, prefix.pages, kind)) continue;
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
                         std::span<PageRef> records) {
  State& state = *state_;
  if (index == 0 && !state.roots.contains(salt)) {
    auto root = std::make_unique<Node>();
    root->salt = salt;
    if (state.listener != nullptr) root->key = state.listener->RootKey(salt);
    state.roots.emplace(salt, std::move(root));
  }
  int64_t found = 0;
  Node* parent = state.Descend(tokens, salt, index, found);
  if (parent == nullptr || found != index) return false;
  const auto key = state.Page(tokens, index);
  const uint64_t hash = HashPage(key);
  Node* node = parent->Child(hash, key);
  if (node == nullptr) {
    auto fresh = std::make_unique<Node>();
    fresh->parent = parent;
    fresh->hash = hash;
    fresh->index = index;
    fresh->tokens.assign(key.begin(), key.end());
    if (state.listener != nullptr) fresh->key = state.listener->ChildKey(parent->key, key);
    fresh->records.resize(records.size());
    fresh->droppable.resize(2 * records.size());
    // Operations that may throw come first. A parent that was a leaf passes its entry on.
    const bool parent_was_leaf = parent->parent != nullptr && parent->children.empty();
    std::map<uint64_t, Node*> entries;
    if (!parent_was_leaf) entries.emplace(0, nullptr);
    node = parent->children.emplace(hash, std::move(fresh))->second.get();
    auto entry = parent_was_leaf ? state.leaves.extract(parent->last_use) : entries.extract(entries.begin());
    entry.key() = node->last_use = ++state.clock;
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
                              PageId exact) {
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, index + 1, found);
  if (found != index + 1 || node->records[static_cast<size_t>(group)].exact != kNoPage) return;
  state_->Attach(*node, group, PageKind::kExact, exact);
}

void PrefixCache::DropRecord(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group,
                             PageId page) noexcept {
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, index + 1, found);
  if (found != index + 1 || node->records[static_cast<size_t>(group)].quantized != page) return;
  if (!state_->IsUnused(group, PageKind::kQuantized, page)) return;
  state_->Report(&RecordListener::OnDrop, *node, group, PageKind::kQuantized);
  state_->Drop(*node, group, PageKind::kQuantized);
}

std::span<const PageRef> PrefixCache::Peek(std::span<const int32_t> tokens, std::string_view salt,
                                           int64_t index) const {
  if (index < 0 || (index + 1) * state_->spec.page_size > static_cast<int64_t>(tokens.size())) return {};
  int64_t found = 0;
  const Node* node = state_->Descend(tokens, salt, index + 1, found);
  if (found != index + 1) return {};
  return node->records;
}

int64_t PrefixCache::Present(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                             std::vector<uint8_t>& present) const {
  const KvCacheSpec& spec = state_->spec;
  present.assign(RecordIndex(spec, max_pages, 0, PageKind::kQuantized), 0);
  int64_t known = 0;
  const Node* node = state_->Descend(tokens, salt, max_pages, known);
  for (int64_t page = known - 1; page >= 0; --page, node = node->parent) {
    for (int group = 0; group < state_->Groups(); ++group) {
      for (const PageKind kind : kPageKinds) {
        const bool has = node->records[static_cast<size_t>(group)].Of(kind) != kNoPage;
        present[RecordIndex(spec, page, group, kind)] = has ? 1 : 0;
      }
    }
  }
  return known;
}

void PrefixCache::SetListener(RecordListener* listener) noexcept {
  state_->listener = listener;
}

bool PrefixCache::EvictOne() {
  State& state = *state_;
  // The loops skip few entries: running sequences reference their own last pages or recently used ones.
  auto leaf = state.leaves.begin();
  while (leaf != state.leaves.end() && !state.IsUnused(*leaf->second)) ++leaf;
  auto record = state.droppable.begin();
  const auto in_use = [&](const State::Droppable& at) {
    return !state.IsUnused(at.group, at.kind, at.node->records[static_cast<size_t>(at.group)].Of(at.kind));
  };
  while (record != state.droppable.end() && in_use(record->second)) ++record;
  if (record != state.droppable.end() && (leaf == state.leaves.end() || record->first < leaf->first)) {
    const State::Droppable at = record->second;
    state.Drop(*at.node, at.group, at.kind);
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
  for (auto at = state.droppable.begin(); at != state.droppable.end();) {
    const State::Droppable record = (at++)->second;
    const PageId page = record.node->records[static_cast<size_t>(record.group)].Of(record.kind);
    if (state.IsUnused(record.group, record.kind, page)) state.Drop(*record.node, record.group, record.kind);
  }
  // Removing a leaf may turn its parent, whose last use is later, into a leaf.
  for (auto at = state.leaves.begin(); at != state.leaves.end();) {
    const uint64_t use = at->first;
    if (state.IsUnused(*at->second)) state.Remove(at->second);
    at = state.leaves.upper_bound(use);
  }
}

}  // namespace kvanta::cache
