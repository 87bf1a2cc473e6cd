// Block table: the pages of one sequence in order. Per KV cache group, a logical page has a quantized record, an exact
// record, or both; pages outside the group's visibility have neither (kv_cache_spec.h, docs/formats.md "The page
// rule").
#pragma once

#include <vector>

#include "cache/page_pool.h"

namespace kvanta::cache {

// Record ids of a page in one KV cache group.
struct PageRef {
  PageId quantized = kNoPage;
  PageId exact = kNoPage;

  bool operator==(const PageRef&) const = default;
  PageId& Of(PageKind kind) noexcept { return kind == PageKind::kQuantized ? quantized : exact; }
  PageId Of(PageKind kind) const noexcept { return kind == PageKind::kQuantized ? quantized : exact; }
};

// Pages of one group. Non-owning: SequenceCache holds the references (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

// Block tables of a sequence as passed to attention: [group][page].
using BlockTables = const PageRef* const*;

}  // namespace kvanta::cache
