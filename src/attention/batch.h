// What every backend needs of a step and of its configuration, checked: the part of MakePlan and of the constructors
// that does not depend on the hardware.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "cache/kv_cache_spec.h"

namespace kvanta::attention {

// One sequence's part of a step, with its place in the rows of q, k, v and out.
struct SequenceRows {
  SequenceSpan span;
  int64_t first_row = 0;

  int64_t End() const noexcept { return span.start + span.tokens; }
};

// The new tokens of one page of one sequence.
struct PageWrite {
  cache::PageRef page;
  int first_slot = 0;  // slots [first_slot, last_slot) of the page are new
  int last_slot = 0;
  int64_t first_row = 0;  // row of k and v that goes to first_slot
};

struct Batch {
  std::vector<SequenceRows> sequences;
  std::vector<std::vector<PageWrite>> writes;  // [KV cache group]
  int64_t rows = 0;
};

// The KV cache groups of a pool, as the layers of `config` see them.
cache::KvCacheSpec SpecOf(const cache::PagePool& store, const BackendConfig& config);

// Checks every sequence against the cache: positions, and that each page that the step writes or that some layer of it
// reads has its records. Throws InputError naming the sequence, the page and what is missing. Reuses `batch`'s memory.
void MakeBatch(const BatchShape& shape, const cache::PagePool& store, const cache::KvCacheSpec& spec, Batch& batch);

// Checks shapes and scales against the layout, and fills in scales that are absent (1.0). Throws InputError.
BackendConfig CheckConfig(BackendConfig config, const formats::CacheLayout& layout);

// The page rule of a layer.
inline cache::ExactPageRule ExactPagesOf(const formats::LayerScheme& layer) noexcept {
  return {.open = layer.exact_pages, .sinks = layer.sink_pages};
}

// The bf16 format, in which exact records are kept.
const formats::Format& ExactFormat() noexcept;

}  // namespace kvanta::attention
