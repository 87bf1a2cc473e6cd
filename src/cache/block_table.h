// The pages of one sequence, in order. A logical page has, per KV cache group, a quantized record, an exact record, or
// both; pages outside the group's visibility have neither (kv_cache_spec.h, docs/formats.md "The page rule").
#pragma once

#include <vector>

#include "cache/page_pool.h"

namespace kvanta::cache {

// A page's records in one group.
struct PageRef {
  PageId quantized = kNoPage;
  PageId exact = kNoPage;

  bool operator==(const PageRef&) const = default;
  PageId& Of(PageKind kind) noexcept { return kind == PageKind::kQuantized ? quantized : exact; }
  PageId Of(PageKind kind) const noexcept { return kind == PageKind::kQuantized ? quantized : exact; }
};

// One group's pages. Plain data: ownership of the references lies with SequenceCache (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

// A sequence's block tables as attention reads them: [group][page].
using BlockTables = const PageRef* const*;

}  // namespace kvanta::cache
