// Closed pages by content: a tree whose edges are whole pages of token ids. Lookup compares the token ids themselves
// (a hash only finds the bucket), so two prompts never share a page by collision. The root is one per identity: model,
// scheme, scales, page size (one tree has one identity) and the caller's salt.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cache/block_table.h"

namespace kvanta::cache {

class PrefixTree {
 public:
  // Keeps references into `store`; evicts least recently used leaves when asked.
  PrefixTree(PageStore& store, int page_size);
  ~PrefixTree();

  // Longest cached prefix of `tokens` in whole pages, at most max_pages. The pages are retained for the caller, who
  // releases them. Marks the path as recently used.
  std::vector<PageRef> Match(std::span<const int32_t> tokens, uint64_t salt, int max_pages);

  // Inserts closed page number `index` (tokens[index*P, (index+1)*P)) below the path of its predecessors, which must be
  // present, else nothing is inserted. The tree takes its own references. Returns the page that is in the tree: an
  // equal page that was there already wins, so callers can share it.
  PageRef Insert(std::span<const int32_t> tokens, uint64_t salt, int index, PageRef page);

  // Releases least recently used leaves that nobody else references until a record of `kind` may be allocated or no
  // such leaf is left; returns whether anything was released.
  bool EvictOne(PageKind kind);

  int64_t Pages() const noexcept;           // nodes in the tree
  int64_t EvictablePages() const noexcept;  // nodes that only the tree references
  void Clear();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
