// Validation of a step and of a backend's configuration: the hardware-independent part of MakePlan and of the backends'
// constructors.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "attention/backend.h"
#include "cache/kv_cache_spec.h"
#include "kvanta/error.h"

namespace kvanta::attention {

// One sequence of a step with its first row in q, k, v and out.
struct SequenceRows {
  SequenceSpan span;
  int64_t first_row = 0;

  int64_t End() const noexcept { return span.start + span.tokens; }
};

// New tokens of one page of a sequence.
struct PageWrite {
  cache::PageRef page;
  int first_slot = 0;  // slots [first_slot, last_slot) of the page are new
  int last_slot = 0;
  int64_t first_row = 0;  // row of k and v for first_slot
};

struct Batch {
  std::vector<SequenceRows> sequences;
  std::vector<std::vector<PageWrite>> writes;      // [KV cache group]
  std::vector<std::vector<cache::PageRef>> aging;  // [KV cache group]: pages whose later levels the step encodes
  // States of recurrent layers: segments of all sequences, and the index of each one's first.
  std::vector<cache::StateSegment> state_segments;
  std::vector<int32_t> first_segments;
  int64_t rows = 0;
};

// For MakePlan: `plan` as the backend's own type, made if there is none yet. Throws InputError if another backend made
// it.
template <class OwnPlan>
OwnPlan& ReuseOrMake(std::unique_ptr<Plan>& plan) {
  if (!plan) plan = std::make_unique<OwnPlan>();
  auto* own = dynamic_cast<OwnPlan*>(plan.get());
  if (own == nullptr) throw InputError("MakePlan: the plan to reuse was made by another backend");
  return *own;
}

// KV cache groups of a pool with the visibility of the layers of `config`.
cache::KvCacheSpec SpecOf(const cache::PagePool& pool, const BackendConfig& config);

// Fills `batch`, reusing its memory. Checks positions, and that each page which the step writes or any layer reads has
// its records. Throws InputError naming the sequence, the page and the missing record.
void MakeBatch(const BatchShape& shape, const cache::PagePool& pool, const cache::KvCacheSpec& spec, Batch& batch);

// Backend::AcceptDrafts.
void AcceptDrafts(std::span<const int> accepted, Batch& batch) noexcept;

// States of a recurrent layer of `pool` in a step.
cache::StateStep StatesOf(const Batch& batch, const cache::PagePool& pool, int layer) noexcept;

// Largest head_dim of a backend's kernels, K and V apart; every backend takes latents up to formats::kMaxLatentRank.
struct BackendLimit {
  std::string_view backend;
  int head_dim = 0;
};

// Checks shapes and scales against the layout and the backend's limit; absent scales become 1.0. Throws InputError.
BackendConfig CheckConfig(BackendConfig config, const formats::CacheLayout& layout, BackendLimit limit);

// True for layers whose attention is divided by classes of pages: of latents, of which every query reads all.
inline bool DividesPages(const formats::LayerScheme& scheme, const AttentionSpec& attention) noexcept {
  return scheme.rope_dim != 0 && attention.index_topk == 0;
}

// Tokens of a query in layers with sparse attention; 0: there are none.
int TopkOf(std::span<const AttentionSpec> layers) noexcept;

// Page rule of a layer.
inline cache::ExactPageRule ExactPagesOf(const formats::LayerScheme& layer) noexcept {
  return {.open = layer.exact_pages, .sinks = layer.sink_pages};
}
inline cache::PageRule PageRuleOf(const formats::LayerScheme& layer) noexcept {
  return {.exact = ExactPagesOf(layer), .ages = cache::AgesOf(layer)};
}

// Format of exact records: bf16.
const formats::Format& ExactFormat() noexcept;

}  // namespace kvanta::attention
