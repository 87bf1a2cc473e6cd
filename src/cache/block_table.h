// Block table: the pages of one sequence in order. Per KV cache group, a logical page has a quantized record, an exact
// record, records of later levels, or several of them; pages outside the group's visibility have none (kv_cache_spec.h,
// docs/formats.md "The page rule").
#pragma once

#include <iterator>
#include <vector>

#include "cache/page_pool.h"
#include "cache/visibility.h"

namespace kvanta::cache {

// Record ids of a page in one KV cache group.
struct PageRef {
  PageId quantized = kNoPage;
  PageId exact = kNoPage;
  PageId aged[std::size(kAgedKinds)] = {kNoPage, kNoPage};  // by AgeIndex

  bool operator==(const PageRef&) const = default;
  PageId& Of(PageKind kind) noexcept {
    if (IsAged(kind)) return aged[AgeIndex(kind)];
    return kind == PageKind::kQuantized ? quantized : exact;
  }
  PageId Of(PageKind kind) const noexcept {
    if (IsAged(kind)) return aged[AgeIndex(kind)];
    return kind == PageKind::kQuantized ? quantized : exact;
  }
};

// Level of a page with precision by pressure: the first one of which there is a record.
inline int LevelOf(const PageRef& page) noexcept {
  if (page.quantized != kNoPage || (page.aged[0] == kNoPage && page.aged[1] == kNoPage)) return 0;
  return page.aged[0] != kNoPage ? 1 : 2;
}
// The record that a query reads of a page whose exact one it does not.
inline PageKind HeldLevel(const PageRef& page) noexcept {
  return LevelKind(LevelOf(page));
}

// Its id; kNoPage if there is none.
inline PageId HeldRecordOf(const PageRef& page) noexcept {
  return page.Of(HeldLevel(page));
}

// The record that a query in page `own` reads of `page`, whose records are `ref`.
inline PageKind ReadKind(const PageRule& rule, int64_t own, int64_t page, const PageRef& ref) noexcept {
  const PageKind kind = rule.Kind(own, page);
  return kind == PageKind::kQuantized && rule.ages.HasFloor() ? HeldLevel(ref) : kind;
}

// Pages of one group. Non-owning: SequenceCache holds the references (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

// Block tables of a sequence as passed to attention: [group][page].
using BlockTables = const PageRef* const*;

}  // namespace kvanta::cache
