// Attention to rows that are K and V in one, on a CPU: those of a window of tokens, and compressed entries of the
// tokens before (DeepSeek V4). A query's rows, first the entries and then the window, each ascending, are copied to
// pages that the kernels of dense attention read, 1,024 at a time; results of these splits are combined in their order.
// Which rows they are depends on the query's position and on its selection alone, so the bits are the same however a
// prompt is divided (docs/adr/0095).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/entry_exchange.h"
#include "attention/layer_view.h"
#include "attention/prefetch_plan.h"
#include "attention/tile_attention.h"
#include "attention/token_selector.h"
#include "base/device.h"
#include "base/thread_pool.h"

namespace kvanta::attention {

class CompressedAttention {
 public:
  // layers: those with shared_kv are used. ranks: those that divide the pages of entries; null: this one has all. All
  // arguments outlive it.
  CompressedAttention(Device& device, const std::vector<LayerView>& layers, int page_size,
                      const kernels::AttentionKernels& kernels, ThreadPool& threads, parallel::Communicator* ranks);

  // Reserves memory for a step's entries of other ranks.
  void MakePlan(const Batch& batch);

  struct Step {
    const Batch& batch;
    const ChosenTokens& chosen;  // the entries that rows attend to, of layers with index_topk
  };
  // Backend::Run of all rows of the step. workspaces: one per thread, their queries are lost.
  void Run(const Step& step, int layer, const QueryRows& rows, std::vector<TileWorkspace>& workspaces) noexcept;

 private:
  // A thread's pages of copies, and results of a row: of a split, and of all so far.
  struct Workspace {
    Buffer pages;
    std::vector<cache::PageRef> table;
    std::vector<kernels::SoftmaxState> states, totals;  // [heads]
    std::vector<float> out, sums;                       // [heads][head_dim]
  };
  // Rows that a query attends to.
  struct Rows {
    std::span<const int32_t> chosen;  // entries; empty: all
    int64_t entries = 0;
    int64_t first_token = 0, tokens = 0;

    int64_t Count() const noexcept { return entries + tokens; }
  };
  Rows RowsOf(const Step& step, const LayerView& layer, int64_t row, int64_t position) const noexcept;
  const SequenceRows& SequenceOf(const Batch& batch, int64_t row) const noexcept;
  // Gets the entries of other ranks for some rows, from `first_row` on, and returns the row after them.
  int64_t GetEntries(const Step& step, const LayerView& layer, int64_t first_row) noexcept;
  // row: of the step.
  void Gather(const LayerView& layer, const SequenceSpan& span, const Rows& rows, int64_t row, int64_t first,
              int64_t last, Workspace& workspace) const noexcept;
  // Query heads [first, end) of a row.
  struct HeadRange {
    int64_t row = 0;
    int first = 0, end = 0;
  };
  void Attend(const Step& step, int layer, const HeadRange& heads, const QueryRows& rows, Workspace& workspace,
              TileWorkspace& tile_workspace) const noexcept;

  // Rows of the step, whose entries are here.
  struct RowRange {
    int64_t first = 0, end = 0;
  };
  void AttendRows(const Step& step, int layer, const RowRange& range, const QueryRows& rows,
                  std::vector<TileWorkspace>& workspaces) noexcept;

  const std::vector<LayerView>& layers_;
  const int page_size_;
  const kernels::AttentionKernels& kernels_;
  ThreadPool& threads_;
  std::vector<formats::LayerScheme> schemes_;  // of the layers, alone in a record
  std::vector<AttentionSpec> attention_;       // of the layers, of all rows that were copied, without sinks
  std::vector<Workspace> workspaces_;
  std::optional<EntryExchange> exchange_;
  std::vector<EntryExchange::Row> exchanged_rows_;
  int64_t first_exchanged_ = 0;  // row of the step
};

}  // namespace kvanta::attention
