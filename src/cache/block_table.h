// The pages of one sequence, in order, and the rule by which a query position reads them (docs/formats.md, "The page
// rule"). A logical page may have a quantized record, an exact record, or both.
//
// Which records page j of a step over positions [start, start + tokens) has (a query at page jq reads, in a layer with
// exact_open, the exact record of page j if j > jq - exact_pages or j < its sink_pages, else the quantized one; a layer
// without exact_open reads and writes the quantized record only):
//   quantized  iff some layer is without exact_open, or the page is closed (filled to its last token before or in this
//              step) and j >= sink_pages of some layer
//   exact      iff some layer has exact_open, and the page holds one of the step's positions, or lies less than the
//              most exact_pages of a layer before the first of these, or j < the most sink_pages of a layer
// Pages wholly behind the sliding window of every layer may have neither.
#pragma once

#include <vector>

#include "cache/page_pool.h"

namespace kvanta::cache {

struct PageRef {
  PageId quantized = kNoPage;
  PageId exact = kNoPage;

  bool operator==(const PageRef&) const = default;
};

// Plain data: ownership of the references lies with SequenceCache (sequence_cache.h).
using BlockTable = std::vector<PageRef>;

}  // namespace kvanta::cache
