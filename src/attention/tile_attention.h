// Attends one tile of query rows to runs of cached pages, with the kernels of one ISA unit: prepares the queries, walks
// the pages by the page rule, keeps the online softmax. Memory: O(tile), one TileWorkspace per thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/layer_view.h"
#include "attention/prefetch_plan.h"
#include "attention/work_list.h"
#include "base/device.h"
#include "kernels/attention/cpu/table.h"

namespace kvanta::attention {

using kernels::SoftmaxState;

// What a worker needs for its tile.
class TileWorkspace {
 public:
  // Room for `rows` rows of any layer in `layers`. May throw (memory).
  void Reserve(Device& device, int rows, const std::vector<LayerView>& layers,
               const kernels::AttentionKernels& kernels);

  // Before the queries of another layer or step.
  void InvalidateQueries() noexcept { prepared_ = nullptr; }

 private:
  friend class TileAttention;
  Buffer memory_;
  int rows_ = 0;
  int64_t query_stride_ = 0;
  const Tile* prepared_ = nullptr;  // whose queries these are: tasks of one tile often follow each other
  bool prepared_for_[2] = {};       // the quantized code, the exact one
  // Prepared for the quantized code, for the exact one, and (K's plain channels alone) for theirs.
  uint8_t* queries_[3] = {};
  float* row_scale_[3] = {};
  float* bias_ = nullptr;  // q.mean, used with softcap
  SoftmaxState* split_state_ = nullptr;
  SoftmaxState* total_state_ = nullptr;
  float* split_out_ = nullptr;  // [rows][head_dim]
  float* total_out_ = nullptr;
  float* rescale_ = nullptr;  // [kPassRows]
  float* scores_ = nullptr;   // [kPassRows][kMaxPageTokens]
  float* unquantized_scores_ = nullptr;
  uint8_t* workspace_ = nullptr;
  uint8_t* values_ = nullptr;  // codes of a page of latents, in V's order
};

class TileAttention {
 public:
  // Of runs [first_split, last_split) of a tile.
  TileAttention(const kernels::AttentionKernels& kernels, const LayerView& layer, const Tile& tile, int64_t first_split,
                int64_t last_split, const cache::PageRef* pages, TileRows rows, TileWorkspace& workspace) noexcept;

  // What the same thread attends afterwards.
  void SetNext(TileAttention& next) noexcept { reads_.SetNext(next.reads_); }

  // Attends the runs one after the other and writes the finished rows.
  void Finish() noexcept;

  // Attends the only run; its partial result: states [rows], out [rows][head_dim].
  void Partial(SoftmaxState* states, float* out) noexcept;

  // Merges partial results of the runs, [run][rows], in order, and writes the finished rows of KV head `head` of the
  // tile's.
  void CombineSplits(int head, const SoftmaxState* states, const float* partial) noexcept;

 private:
  static constexpr Ahead kNothingAhead = {};
  void PrepareQueries() noexcept;
  void PrepareHead(int head, bool for_quantized, bool for_exact) noexcept;
  template <class AfterHead>
  void AttendSplit(int64_t run, AfterHead after_head) noexcept;
  void TransposeLatents(int64_t page, const PageView& view, int tokens) noexcept;
  void AttendPage(int64_t page, const PageView& view, const Ahead& ahead, int tokens) noexcept;
  void ScoreRows(const PageView& view, int groups, int first_row, int rows, kernels::WorkspaceUse workspace_use,
                 const kernels::Prefetch& prefetch) noexcept;
  void AttendRows(const PageView& view, int begin, int end, int first_row, int rows,
                  kernels::WorkspaceUse workspace_use, const Ahead& ahead) noexcept;
  void WriteRow(int row, const SoftmaxState& state, const float* sums) noexcept;
  int HeadRows() const noexcept { return tile_.tokens * group_; }
  int Rows() const noexcept { return tile_.kv_heads * HeadRows(); }

  const kernels::AttentionKernels& kernels_;
  const LayerView& layer_;
  const Tile& tile_;
  const int64_t first_split_;
  const int64_t last_split_;
  PrefetchPlan reads_;
  TileWorkspace& work_;
  const int group_;  // query heads of the KV head
  const int head_dim_;
  const int page_size_;
};

}  // namespace kvanta::attention
