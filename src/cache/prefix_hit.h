// Prefix hits: which records the queries after a hit read, and how long a hit is with the records that are present. In
// memory and in the store alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <vector>

#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"

namespace kvanta::cache {

// Place of a record in arrays [page][group][kind].
inline size_t RecordIndex(const KvCacheSpec& spec, int64_t page, int group, PageKind kind) noexcept {
  return static_cast<size_t>(page) * spec.groups.size() * std::size(kPageKinds) + RecordIndex(group, kind);
}

// True if queries after a hit of `pages` pages read the record of this kind of page `page`.
inline bool ReadsAfterHit(const KvCacheGroup& group, int64_t page, int64_t pages, PageKind kind) noexcept {
  if (page < group.FirstPage(pages * group.page_size)) return false;
  if (kind == PageKind::kQuantized) return group.NeedsQuantized(page, true);
  return group.NeedsExact(page, page >= pages - group.exact_before);
}

// True for a record without which hits elsewhere can do: outside a window, or an exact copy that only a hit which ends
// there reads. A record that is not is read by every hit on its page and on later ones.
inline bool IsDroppable(const KvCacheGroup& group, int64_t page, PageKind kind) noexcept {
  return !group.visibility.IsFull() || (kind == PageKind::kExact && page >= group.sink_pages);
}

// Longest hit of at most `pages` pages for which every group has the records that later queries read; 0 if none.
// has(page, group, kind): true if the record is present.
template <class Has>
int64_t LongestHit(const KvCacheSpec& spec, int64_t pages, Has has) {
  int64_t longest = 0;
  // Per group, no gap from the first record that is read.
  std::vector<int64_t> whole_from(spec.groups.size(), 0);
  for (int64_t page = 0; page < pages; ++page) {
    const int64_t end = page + 1;
    bool ends_here = true;
    for (size_t g = 0; g < spec.groups.size(); ++g) {
      const KvCacheGroup& group = spec.groups[g];
      const int number = static_cast<int>(g);
      const bool whole = (!group.NeedsQuantized(page, true) || has(page, number, PageKind::kQuantized)) &&
                         (!group.NeedsExact(page, false) || has(page, number, PageKind::kExact));
      if (!whole) whole_from[g] = end;
      ends_here = ends_here && whole_from[g] <= group.FirstPage(end * spec.page_size);
      for (int64_t exact = std::max<int64_t>(0, end - group.exact_before); exact < end; ++exact) {
        ends_here = ends_here && has(exact, number, PageKind::kExact);
      }
    }
    if (ends_here) longest = end;
  }
  return longest;
}

}  // namespace kvanta::cache
