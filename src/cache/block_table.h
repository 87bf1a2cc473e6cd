// Block table: the pages of one sequence in order. Per KV cache group, a logical page has a quantized record, an exact
// record, records of later levels, or several of them; pages outside the group's visibility have none (kv_cache_spec.h,
// docs/formats.md "The page rule").
#pragma once

#include <iterator>
#include <vector>

#include "cache/page_pool.h"

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

// Pages of one group. Non-owning: SequenceCache holds the references (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

// Block tables of a sequence as passed to attention: [group][page].
using BlockTables = const PageRef* const*;

}  // namespace kvanta::cache
