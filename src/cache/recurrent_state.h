// States of recurrent layers (Gated DeltaNet) in the cache. A page's record in their KV cache group holds the state
// after the page's last token so far, of all these layers: a page that is being filled has the sequence's working
// state, some closed pages have snapshots, from which prefix hits continue.
#pragma once

#include <cstdint>
#include <span>

#include "cache/page_pool.h"

namespace kvanta::cache {

// Rows of a step after which the state is stored, or drafted ones. A sequence's segments follow one another.
struct StateSegment {
  int64_t first_row = 0;
  int32_t tokens = 0;
  PageId from = kNoPage;  // record of the state before the first token; kNoPage: zeros
  // Record of the state after the last token; may be `from`. kNoPage: drafted rows, whose state is not stored
  // (docs/adr/0087). They are a sequence's last segment.
  PageId to = kNoPage;
};

// The segments of a step in a GPU's memory, where captured launches find those of later steps.
struct StateTable {
  const StateSegment* segments = nullptr;
  const int32_t* first_segments = nullptr;  // [sequences + 1]: each sequence's first segment, and the end of the last's
  int32_t sequences = 0;
};

// The segments of a step, and a layer's states in the records.
struct StateStep {
  std::span<const StateSegment> segments;
  std::span<const int32_t> first_segments;  // each sequence's first segment
  uint8_t* base = nullptr;                  // the layer's state in record 0
  int64_t record_bytes = 0;
  // On a GPU: the same segments there, and the largest number of sequences that launches of this step are replayed for.
  const StateTable* table = nullptr;
  int64_t max_sequences = 0;

  std::span<const StateSegment> OfSequence(size_t sequence) const noexcept {
    const auto begin = static_cast<size_t>(first_segments[sequence]);
    const bool is_last = sequence + 1 == first_segments.size();
    const size_t end = is_last ? segments.size() : static_cast<size_t>(first_segments[sequence + 1]);
    return segments.subspan(begin, end - begin);
  }
  // Null for the state of zeros.
  float* State(PageId page) const noexcept {
    return page == kNoPage ? nullptr : reinterpret_cast<float*>(base + page * record_bytes);
  }
};

}  // namespace kvanta::cache
