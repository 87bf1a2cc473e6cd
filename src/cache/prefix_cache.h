// Prefix cache: a radix tree of closed pages whose edges are whole pages of token ids. Lookup compares the token ids
// (a hash only selects the bucket), so hash collisions never share pages. A cache serves one combination of model,
// scheme, scales and page size; it has one root per salt.
//
// With precision by pressure, the events of queries in a page (level_event.h) are part of its edge, next to the tokens:
// a page computed after a demotion has other bits. Listeners are not told of such pages, nor of later levels.
//
// A node holds the page's records of all or some KV cache groups: records outside a sliding window can be evicted
// before the page. A hit ends at a page where every group has the records that the next query reads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "cache/block_table.h"
#include "cache/kv_cache_spec.h"
#include "cache/level_encoder.h"
#include "cache/level_event.h"
#include "cache/record_listener.h"

namespace kvanta::cache {

class PrefixCache {
 public:
  // `pool` must outlive the prefix cache, which holds references to its records. `now`: the clock of pins.
  PrefixCache(PagePool& pool, const KvCacheSpec& spec, Clock now = Now);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  struct Prefix {
    int64_t pages = 0;  // length of the hit
    int64_t known = 0;  // pages of `tokens` in the tree, at most max_pages; more than `pages` if records are missing
    std::vector<BlockTable> records;  // [group][pages]; retained, the caller releases them
    LevelEvents events;               // of the hit's pages, and those that make its queries read what is cached
  };
  // Finds the longest cached prefix of `tokens` in whole pages, at most max_pages, for which every group has the
  // records that later queries read. Marks them as recently used. Of pages that differ in events, it prefers those
  // without, then those used last.
  Prefix Match(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages);

  // events, of this and the following methods: those of the sequence, by position; the path is that of pages computed
  // with them.

  // Inserts closed page `index` (tokens[index*P, (index+1)*P)); returns false, without effect, if its predecessors are
  // not in the cache. records: [group]. In: the caller's records; the cache retains those that it does not have yet.
  // Out: the cache's records, which differ where an equal page was present (not retained for the caller).
  bool Insert(std::span<const int32_t> tokens, std::string_view salt, int64_t index, std::span<PageRef> records,
              std::span<const LevelEvent> events = {});

  // Adds an exact record of a group to page `index` on the path of `tokens`, if the page is present and has none. The
  // cache retains the record.
  void AttachExact(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group, PageId exact,
                   std::span<const LevelEvent> events = {});

  // Drops a group's record of page `index` on the path of `tokens`, if it is `page` and nobody else holds it.
  void DropRecord(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int group, PageId page,
                  std::span<const LevelEvent> events = {}) noexcept;

  // Records of page `index` on the path of `tokens`, [group], without retaining them or changing the LRU order; empty
  // if the page is absent.
  std::span<const PageRef> Peek(std::span<const int32_t> tokens, std::string_view salt, int64_t index,
                                std::span<const LevelEvent> events = {}) const;

  // Adds later levels of page `index`, [group], and drops the records of the levels before `level` that nobody else
  // holds.
  void AttachLevels(std::span<const int32_t> tokens, std::string_view salt, int64_t index, int level,
                    std::span<const PageRef> records, std::span<const LevelEvent> events);

  // Demotes the least recently used page above the floor that nobody uses by one level. False if there is none.
  bool DemoteOne(const LevelEncoder& encode);

  // Sets `present`, 0 or 1 for each record of the first max_pages pages of `tokens`: [page][group][kind]. A later level
  // by pressure counts as the quantized record. Returns the number of pages in the tree.
  int64_t Present(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                  std::vector<uint8_t>& present) const;

  // Reports records that come, are used and go to `listener`. Listeners are added while the cache is empty: the first
  // one gives pages their keys.
  void AddListener(RecordListener& listener);
  void RemoveListener(RecordListener& listener) noexcept;

  // Calls visit for every record, a page's before those of the pages after it.
  void VisitRecords(const std::function<void(const CachedRecord&)>& visit) const;

  // Keeps the first `pages` pages of `tokens` for `seconds`: other pages are evicted before them. Together, pages that
  // are kept take at most max_bytes; beyond it, the last ones of this prefix are not.
  void Pin(std::span<const int32_t> tokens, std::string_view salt, int64_t pages, double seconds, int64_t max_bytes);
  int64_t PinnedBytes() noexcept;

  // Evicts the least recently used unreferenced entry: a leaf page, or a record that only hits ending near its page
  // read (outside a window, or an exact copy); a pinned one only if there is no other. Returns false if there is none.
  bool EvictOne();

  int64_t Pages() const noexcept;      // pages in the tree
  int64_t Evictions() const noexcept;  // successful calls of EvictOne
  void Clear();                        // drops all pages without other references

 private:
  struct Node;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
