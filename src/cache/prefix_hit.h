// Prefix hits: which records the queries after a hit read, and how long a hit is with the records that are present. In
// memory and in the store alike.
#pragma once

#include <algorithm>
#include <array>
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
  if (kind == PageKind::kExact) return group.NeedsExact(page, page >= pages - group.exact_before);
  return group.Keeps(kind, page, pages * group.page_size);
}

// True for a record without which hits elsewhere can do: outside a window, an exact copy that only a hit which ends
// there reads, or a level before the last one. A record that is not is read by every hit on its page and on later ones,
// once these are old enough.
inline bool IsDroppable(const KvCacheGroup& group, int64_t page, PageKind kind) noexcept {
  if (!group.visibility.IsFull()) return true;
  if (kind == PageKind::kExact) return page >= group.sink_pages;
  if (kind == PageKind::kQuantized) return group.ages.IsUsed() && page >= group.ages.ageless;
  return AgeIndex(kind) + 1 < group.ages.Levels();
}

// Longest hit of at most `pages` pages for which every group has the records that later queries read; 0 if none.
// has(page, group, kind): true if the record is present.
template <class Has>
int64_t LongestHit(const KvCacheSpec& spec, int64_t pages, Has has) {
  int64_t longest = 0;
  // Per group and kind, no gap from the first record that is read. Pages without ages and exact records count with
  // kExact.
  std::vector<std::array<int64_t, std::size(kPageKinds)>> whole_from(spec.groups.size());
  for (int64_t page = 0; page < pages; ++page) {
    const int64_t end = page + 1;
    bool ends_here = true;
    for (size_t g = 0; g < spec.groups.size(); ++g) {
      const KvCacheGroup& group = spec.groups[g];
      const int number = static_cast<int>(g);
      const int64_t first = group.FirstPage(end * spec.page_size);
      auto& whole = whole_from[g];
      const bool is_ageless = page < group.ages.ageless;
      if (group.NeedsQuantized(page, true) && !has(page, number, PageKind::kQuantized)) {
        whole[KindIndex(is_ageless ? PageKind::kExact : PageKind::kQuantized)] = end;
      }
      if (group.NeedsExact(page, false) && !has(page, number, PageKind::kExact))
        whole[KindIndex(PageKind::kExact)] = end;
      ends_here = ends_here && whole[KindIndex(PageKind::kExact)] <= first &&
                  whole[KindIndex(PageKind::kQuantized)] <= std::max(first, group.FirstYoung(end * spec.page_size));
      // The page that has aged at this end, and none at an earlier one.
      const int64_t aged = group.ages.IsUsed() ? group.FirstYoung(end * spec.page_size) - 1 : -1;
      for (size_t age = 0; age < group.ages.Levels(); ++age) {
        const PageKind kind = kAgedKinds[age];
        if (aged >= group.ages.ageless && group.Reaches(kind, aged) && !has(aged, number, kind)) {
          whole[KindIndex(kind)] = aged + 1;
        }
        const bool is_last = age + 1 == group.ages.Levels();
        const int64_t left = is_last ? 0 : end - group.ages.pages[age + 1] + 1;  // earlier pages are in the next level
        ends_here = ends_here && whole[KindIndex(kind)] <= std::max(first, left);
      }
      for (int64_t exact = std::max<int64_t>(0, end - group.exact_before); exact < end; ++exact) {
        ends_here = ends_here && has(exact, number, PageKind::kExact);
      }
    }
    if (ends_here) longest = end;
  }
  return longest;
}

}  // namespace kvanta::cache
