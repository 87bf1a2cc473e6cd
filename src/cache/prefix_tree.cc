#include "cache/prefix_tree.h"

#include <algorithm>
#include <list>
#include <map>
#include <string>
#include <unordered_map>

namespace kvanta::cache {
namespace {

// Any mixing function will do: equality is decided by the token ids.
uint64_t HashPage(std::span<const int32_t> tokens) {
  uint64_t hash = 0x9E3779B97F4A7C15ULL;
  for (const int32_t token : tokens) {
    hash = (hash ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

struct PrefixTree::Node {
  Node* parent = nullptr;  // nullptr: a root
  uint64_t hash = 0;       // of tokens
  std::string salt;        // of a root
  std::vector<int32_t> tokens;
  PageRef page;
  std::unordered_multimap<uint64_t, std::unique_ptr<Node>> children;
  std::list<Node*>::iterator use;  // position in State::uses
  bool pinned = false;             // only within CountEvictable

  Node* Child(uint64_t child_hash, std::span<const int32_t> child_tokens) const {
    const auto [first, last] = children.equal_range(child_hash);
    for (auto it = first; it != last; ++it) {
      if (std::ranges::equal(it->second->tokens, child_tokens)) return it->second.get();
    }
    return nullptr;
  }
};

struct PrefixTree::State {
  PagePool& store;
  int page_size;
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots;  // by salt
  std::list<Node*> uses;  // most recent first; a child never before its parent
  int64_t nodes = 0;
  int64_t evictions = 0;

  std::span<const int32_t> Page(std::span<const int32_t> tokens, int64_t index) const {
    return tokens.subspan(static_cast<size_t>(index * page_size), static_cast<size_t>(page_size));
  }

  // The node `depth` pages below the root of `salt`, or as deep as the tree goes; nullptr if there is no such root.
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

  // From the leaf up, so that every parent ends up more recent than its children.
  void Touch(Node* node) {
    for (; node->parent != nullptr; node = node->parent) uses.splice(uses.begin(), uses, node->use);
  }

  bool OnlyOurs(const Node& node) const {
    const auto ours = [&](PageKind kind, PageId page) { return page == kNoPage || store.References(kind, page) == 1; };
    return ours(PageKind::kQuantized, node.page.quantized) && ours(PageKind::kExact, node.page.exact);
  }

  int64_t Bytes(const Node& node) const {
    return (node.page.quantized == kNoPage ? 0 : store.RecordBytes(PageKind::kQuantized)) +
           (node.page.exact == kNoPage ? 0 : store.RecordBytes(PageKind::kExact));
  }

  void Retain(PageRef page) {
    if (page.quantized != kNoPage) store.Retain(PageKind::kQuantized, page.quantized);
    if (page.exact != kNoPage) store.Retain(PageKind::kExact, page.exact);
  }
  void Release(PageRef page) {
    if (page.quantized != kNoPage) store.Release(PageKind::kQuantized, page.quantized);
    if (page.exact != kNoPage) store.Release(PageKind::kExact, page.exact);
  }

  // Removes a leaf, and its root when it was the last child of one.
  void Remove(Node* leaf) {
    Release(leaf->page);
    uses.erase(leaf->use);
    --nodes;
    Node* parent = leaf->parent;
    const auto [first, last] = parent->children.equal_range(leaf->hash);
    for (auto it = first; it != last; ++it) {
      if (it->second.get() == leaf) {
        parent->children.erase(it);
        break;
      }
    }
    if (parent->parent == nullptr && parent->children.empty()) roots.erase(std::string(parent->salt));
  }

  bool EvictLeaf() {
    for (auto it = uses.rbegin(); it != uses.rend(); ++it) {
      if (!(*it)->children.empty() || !OnlyOurs(**it)) continue;
      Remove(*it);
      ++evictions;
      return true;
    }
    return false;
  }

  // Counts nodes whose whole subtree only the tree references. `uses` reversed visits children before parents.
  void CountEvictable(int64_t& count, int64_t& bytes) const {
    for (Node* node : uses) node->pinned = false;
    for (auto it = uses.rbegin(); it != uses.rend(); ++it) {
      const Node& node = **it;
      if (!OnlyOurs(node) || node.pinned) {
        node.parent->pinned = true;
      } else {
        ++count;
        bytes += Bytes(node);
      }
    }
  }
};

PrefixTree::PrefixTree(PagePool& store, int page_size) : state_(new State{store, page_size, {}, {}, 0, 0}) {}

PrefixTree::~PrefixTree() {
  // From the leaves up: a chain that destroyed itself from its root would recurse once per page.
  while (!state_->uses.empty()) state_->Remove(state_->uses.back());
}

std::vector<PageRef> PrefixTree::Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages) {
  max_pages = std::min<int64_t>(max_pages, static_cast<int64_t>(tokens.size()) / state_->page_size);
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, max_pages, found);
  std::vector<PageRef> pages(static_cast<size_t>(found));
  if (found == 0) return pages;
  state_->Touch(node);
  for (; node->parent != nullptr; node = node->parent) {
    state_->Retain(node->page);
    pages[static_cast<size_t>(--found)] = node->page;
  }
  return pages;
}

PageRef PrefixTree::Insert(std::span<const int32_t> tokens, std::string_view salt, int64_t index, PageRef page) {
  State& state = *state_;
  if (index == 0) {
    auto& root = state.roots[std::string(salt)];
    if (!root) root = std::make_unique<Node>();
    root->salt = salt;
  }
  int64_t found = 0;
  Node* parent = state.Descend(tokens, salt, index, found);
  if (parent == nullptr || found != index) return page;
  const auto key = state.Page(tokens, index);
  const uint64_t hash = HashPage(key);
  if (Node* equal = parent->Child(hash, key)) {
    state.Touch(equal);
    return equal->page;
  }
  auto node = std::make_unique<Node>();
  node->parent = parent;
  node->hash = hash;
  node->tokens.assign(key.begin(), key.end());
  node->page = page;
  // What may throw comes first, the list's element before the tree's: nothing is half inserted.
  std::list<Node*> use{node.get()};
  Node* inserted = parent->children.emplace(hash, std::move(node))->second.get();
  state.uses.splice(state.uses.begin(), use);
  inserted->use = state.uses.begin();
  state.Retain(page);
  state.Touch(inserted);
  ++state.nodes;
  return page;
}

void PrefixTree::AttachExact(std::span<const int32_t> tokens, std::string_view salt, int64_t index, PageId exact) {
  int64_t found = 0;
  Node* node = state_->Descend(tokens, salt, index + 1, found);
  if (found != index + 1 || node->page.exact != kNoPage) return;
  state_->store.Retain(PageKind::kExact, exact);
  node->page.exact = exact;
}

const PageRef* PrefixTree::Peek(std::span<const int32_t> tokens, std::string_view salt, int64_t index) const {
  if (index < 0 || (index + 1) * state_->page_size > static_cast<int64_t>(tokens.size())) return nullptr;
  int64_t found = 0;
  const Node* node = state_->Descend(tokens, salt, index + 1, found);
  return found == index + 1 ? &node->page : nullptr;
}

bool PrefixTree::EvictOne(PageKind kind) {
  bool any = false;
  while (state_->store.FreePages(kind) == 0 && state_->EvictLeaf()) any = true;
  return any;
}

int64_t PrefixTree::Pages() const noexcept {
  return state_->nodes;
}

int64_t PrefixTree::Evictions() const noexcept {
  return state_->evictions;
}

int64_t PrefixTree::EvictablePages() const noexcept {
  int64_t count = 0;
  int64_t bytes = 0;
  state_->CountEvictable(count, bytes);
  return count;
}

int64_t PrefixTree::EvictableBytes() const noexcept {
  int64_t count = 0;
  int64_t bytes = 0;
  state_->CountEvictable(count, bytes);
  return bytes;
}

void PrefixTree::Clear() {
  // One pass from the least recently used on: children come before their parents.
  for (auto it = state_->uses.end(); it != state_->uses.begin();) {
    Node* node = *--it;
    if (!node->children.empty() || !state_->OnlyOurs(*node)) continue;
    auto next = std::next(it);
    state_->Remove(node);
    it = next;
  }
}

}  // namespace kvanta::cache
