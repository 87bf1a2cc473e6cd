// The pages of one sequence, in order, and the rule by which a query position reads them (docs/formats.md, "The page
// rule"). A logical page may have a quantized record, an exact record, or both.
#pragma once

#include <vector>

#include "cache/page_store.h"

namespace kvanta::cache {

struct PageRef {
  PageId quantized = kNoPage;
  PageId exact = kNoPage;
};

// Plain data: ownership of the references lies with SequenceCache (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

}  // namespace kvanta::cache
