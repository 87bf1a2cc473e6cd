// Attention of one query tile over KV splits: prepares the queries, iterates over the pages by the page rule and
// maintains the online softmax, with the kernels of one instruction set. Memory: one TileWorkspace per thread, O(tile).
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <vector>

#include "attention/layer_view.h"
#include "attention/prefetch_plan.h"
#include "attention/work_list.h"
#include "base/device.h"
#include "cache/visibility.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

// Alignment of arrays in a workspace, in bytes: that of the widest vectors.
inline constexpr int64_t kWorkspaceAlignment = 64;

using kernels::SoftmaxState;

// True if `kernels` has those of the layer's formats.
bool Attends(const kernels::AttentionKernels& kernels, const formats::LayerScheme& layer) noexcept;

// Per-thread scratch memory for one query tile.
class TileWorkspace {
 public:
  // Allocates for tiles of up to `rows` rows of any of `layers`. Throws if memory runs out.
  void Reserve(Device& device, int rows, const std::vector<LayerView>& layers,
               const kernels::AttentionKernels& kernels);

  // Discards prepared queries. Call before another layer or step.
  void InvalidateQueries() noexcept { prepared_ = nullptr; }

 private:
  friend class TileAttention;
  Buffer memory_;
  int rows_ = 0;
  int64_t query_stride_ = 0;
  const QueryTile* prepared_ = nullptr;  // tile of the prepared queries; consecutive tasks often share it
  bool prepared_for_[std::size(cache::kPageKinds)] = {};
  // Queries prepared for each kind of record and, last, for K's unquantized channels.
  static constexpr size_t kUnquantized = std::size(cache::kPageKinds);
  uint8_t* queries_[kUnquantized + 1] = {};
  float* row_scale_[kUnquantized + 1] = {};
  float* bias_ = nullptr;  // q.mean, used with a softcap or sinks
  SoftmaxState* split_state_ = nullptr;
  float* split_out_ = nullptr;  // [rows][head_dim of V's cells]
  // Totals of splits; with several classes, of nodes of their tree.
  SoftmaxState* total_state_[kTreeDepth] = {};
  float* total_out_[kTreeDepth] = {};
  float* rescale_ = nullptr;  // [kPassRows]
  float* scores_ = nullptr;   // [kPassRows][kMaxPageTokens]
  float* unquantized_scores_ = nullptr;
  uint8_t* workspace_ = nullptr;
  uint8_t* values_ = nullptr;  // transposed latents of a page, in V's order
};

// result = sums / state.sum, transformed back: f32 [channels], from [head_dim of V's cells].
void WriteResult(const kernels::AttentionKernels& kernels, const formats::LayerScheme& layer, const SoftmaxState& state,
                 const float* sums, float* result) noexcept;

class TileAttention {
 public:
  // Attention of `tile` over KV splits [first_split, last_split).
  TileAttention(const kernels::AttentionKernels& kernels, const LayerView& layer, const QueryTile& tile,
                int64_t first_split, int64_t last_split, const cache::PageRef* pages, QueryRows rows,
                TileWorkspace& workspace) noexcept;

  // Sets the task that the same thread processes next, for prefetching.
  void SetNext(TileAttention& next) noexcept { reads_.SetNext(next.reads_); }

  // Processes the splits in ascending order, combines their results and writes the output rows.
  void Finish() noexcept;

  // Processes the only split and stores its result: states [rows], out [rows][head_dim of V's cells].
  void StoreSplitResult(SoftmaxState* states, float* out) noexcept;

  // Combines the split results, [split][rows], in their order and writes the output rows of the tile's KV head `head`.
  void CombineSplits(int head, const SoftmaxState* states, const float* split_out) noexcept;

 private:
  // Calls of the kernels for pages of one kind of record. Arguments that pages have in common are set once per task:
  // set for each page, they took several percent of the time of 4-bit codes.
  struct Passes {
    const kernels::KeyKernel* key_kernel = nullptr;
    const kernels::KeyKernel* unquantized_kernel = nullptr;  // null: K has no unquantized channels
    void (*softmax_kernel)(const kernels::SoftmaxPass& pass) = nullptr;
    const kernels::ValueKernel* value_kernel = nullptr;
    size_t queries = 0;  // index of TileWorkspace::queries_
    kernels::KeyPass keys;
    kernels::KeyPass unquantized;  // K's unquantized channels
    kernels::SoftmaxPass softmax;
    kernels::ValuePass values;
  };
  void PrepareQueries() noexcept;
  using Kinds = bool[std::size(cache::kPageKinds)];
  void PrepareHead(int head, const Kinds& kinds) noexcept;
  template <class AfterHead>
  void AttendSplit(int64_t split, AfterHead after_head) noexcept;
  void TransposeLatents(int64_t page, const PageView& view, int tokens) noexcept;
  void PlanPasses(cache::PageKind kind) noexcept;
  Passes& BindPage(int64_t page, const PageView& view) noexcept;
  void AttendPage(int64_t page, int head, int tokens) noexcept;
  void ScoreRows(Passes& passes, int groups, int first_row, int rows) noexcept;
  void AttendRows(Passes& passes, int begin, int end, int first_row, int rows,
                  kernels::WorkspaceUse workspace_use) noexcept;
  void WriteRow(int row, SoftmaxState state, const float* sums) noexcept;
  void FinishClasses() noexcept;
  int HeadRows() const noexcept { return tile_.tokens * group_; }
  int Rows() const noexcept { return tile_.kv_heads * HeadRows(); }

  const kernels::AttentionKernels& kernels_;
  const LayerView& layer_;
  const QueryTile& tile_;
  const int64_t first_split_;
  const int64_t last_split_;
  PrefetchPlan reads_;
  std::optional<Passes> passes_[std::size(cache::kPageKinds)];
  TileWorkspace& work_;
  // Properties of the layer that every page asks for, side by side: looked up in its scheme and attention each time, it
  // took 1 % of the time of 4-bit codes.
  const int group_;      // query heads per KV head
  const int head_dim_;   // of query and output rows
  const int key_dim_;    // of cells, which may have padding
  const int value_dim_;  // likewise
  const int page_size_;
  const cache::Visibility visibility_;
  const bool shares_cell_;
  const bool has_bias_;  // q.mean of keys stored without their mean: it cancels, except with a softcap or a sink
  const bool has_bit_allocation_;    // K's channels have a bit allocation
  const float* const value_scales_;  // per KV head; or null
};

}  // namespace kvanta::attention
