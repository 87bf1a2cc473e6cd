// Closed pages by content: a tree whose edges are whole pages of token ids. Lookup compares the token ids themselves
// (a hash only finds the bucket), so two prompts never share a page by collision. One tree has one identity (model,
// scheme, scales, page size); inside it there is one root per salt of the caller.
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
  // Keeps references into `store`, which must outlive it; evicts least recently used leaves when asked.
  PrefixTree(PagePool& store, int page_size);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // Longest cached prefix of `tokens` in whole pages, at most max_pages. The records are retained for the caller, who
  // releases them. Marks the path as recently used.
  std::vector<PageRef> Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages);

  // Inserts closed page number `index` (tokens[index*P, (index+1)*P)) below the path of its predecessors, which must be
  // present, else nothing is inserted and `page` returned. The tree takes its own references. Returns the page that is
  // in the tree: an equal page that was there already wins. It is not retained for the caller.
  PageRef Insert(std::span<const int32_t> tokens, std::string_view salt, int64_t index, PageRef page);

  // Gives the page at `index` of the path of `tokens` an exact record, if it is there and has none. The tree takes its
  // own reference.
  void AttachExact(std::span<const int32_t> tokens, std::string_view salt, int64_t index, PageId exact);

  // The page at `index` of the path of `tokens`, without retaining it or touching the order of use; nullptr if absent.
  const PageRef* Peek(std::span<const int32_t> tokens, std::string_view salt, int64_t index) const;

  // Releases least recently used leaves that nobody else references until a record of `kind` may be allocated or no
  // such leaf is left; returns whether anything was released.
  bool EvictOne(PageKind kind);

  int64_t Pages() const noexcept;           // nodes in the tree
  int64_t Evictions() const noexcept;       // nodes that EvictOne has released
  int64_t EvictablePages() const noexcept;  // nodes that eviction could release; walks the tree
  int64_t EvictableBytes() const noexcept;  // of their records
  void Clear();                             // drops every page that nobody else references

 private:
  struct Node;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
