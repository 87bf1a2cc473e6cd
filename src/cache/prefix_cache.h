// Closed pages by content: a radix tree whose edges are whole pages of token ids. Lookup compares the token ids
// themselves (a hash only finds the bucket), so two prompts never share a page by collision. One cache has one identity
// (model, scheme, scales, page size); inside it there is one root per salt of the caller.
//
// A node keeps the page's records of every KV cache group, or of some: what a sliding window has left behind may go
// before the page itself does. A hit ends where every group has the records that the next query reads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cache/block_table.h"
#include "cache/kv_cache_spec.h"

namespace kvanta::cache {

class PrefixCache {
 public:
  // Keeps references into `pool`, which must outlive it; evicts least recently used records when asked.
  PrefixCache(PagePool& pool, const KvCacheSpec& spec);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  struct Prefix {
    int64_t pages = 0;  // whole pages of the hit
    int64_t known = 0;  // pages of `tokens` in the tree, at most max_pages; above `pages`: records are missing
    std::vector<BlockTable> records;  // [group][pages]; retained for the caller, who releases them
  };
  // Longest cached prefix of `tokens` in whole pages, at most max_pages, after which a query can be computed: per
  // group, the records that queries from there on read. Marks them as recently used.
  Prefix Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages);

  // Inserts closed page number `index` (tokens[index*P, (index+1)*P)) after its predecessors, which must be present,
  // else nothing is inserted. records: [group]; in: the caller's, of which the cache takes references of its own where
  // it has none; out: those that are in the cache now, where an equal page was there already (not retained for the
  // caller). Returns false if nothing was inserted.
  bool Insert(std::span<const int32_t> tokens, std::string_view salt, int64_t index, std::span<PageRef> records);

  // Gives the page at `index` of the path of `tokens` an exact record of a group, if it is there and has none. The
  // cache takes its own reference.
  void AttachExact(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group, PageId exact);

  // Records of the page at `index` of the path of `tokens`, [group], without retaining them or touching the order of
  // use; empty if absent.
  std::span<const PageRef> Peek(std::span<const int32_t> tokens, std::string_view salt, int64_t index) const;

  // Releases what was used longest ago and nobody else references: a page that no other page follows, or a record that
  // hits can do without elsewhere (after a window has passed, an exact copy). False if there is nothing.
  bool EvictOne();

  int64_t Pages() const noexcept;      // in the tree
  int64_t Evictions() const noexcept;  // calls of EvictOne that released something
  void Clear();                        // drops every page that nobody else references

 private:
  struct Node;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
