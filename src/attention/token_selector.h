// Selection of the tokens that rows attend to (Backend::Select) on a CPU: scores of all tokens by the kernels of keys,
// page by page, then the exact top k. A row's scores are chains of operations of their own, whatever rows, chunks or
// threads compute them (docs/adr/0088).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/layer_view.h"
#include "base/device.h"
#include "base/thread_pool.h"
#include "kernels/attention/cpu/table.h"
#include "parallel/communicator.h"

namespace kvanta::attention {

// A row that attends to chosen tokens alone: it sees more than top_k. Where keys stand for several tokens, entries take
// the place of tokens: `position` is the last entry that the row sees.
struct SparseRow {
  size_t sequence = 0;  // index in the batch
  int64_t row = 0;
  int64_t position = 0;
};

// Rows [first, last) of ChosenTokens, of one sequence and page, and pages whose tokens are scored for them.
struct ScoreTask {
  size_t first_row = 0, last_row = 0;
  int64_t first_page = 0, last_page = 0;
};

// Rows and tasks that are scored together, as much as the memory of scores allows.
struct ScoreWave {
  size_t first_row = 0, last_row = 0;
  size_t first_task = 0, last_task = 0;
};

// The sparse rows of a step, and the tokens that the last Select chose for them.
struct ChosenTokens {
  int top_k = 0;
  std::vector<SparseRow> rows;     // in the order of the batch
  std::vector<int32_t> positions;  // [rows][top_k], each row's ascending
  std::vector<ScoreTask> tasks;
  std::vector<ScoreWave> waves;
  int64_t score_stride = 0;     // of a row
  std::vector<float> scores;    // [rows of a wave][score_stride]
  std::vector<float> received;  // scores of all ranks: [ranks][rows of a wave][its pages][keys of a page]
  std::vector<int32_t> orders;  // scratch of the top k: [threads][score_stride]

  std::span<const int32_t> Of(size_t index) const noexcept {
    return std::span(positions).subspan(index * static_cast<size_t>(top_k), static_cast<size_t>(top_k));
  }
  // Positions chosen for a row of the batch; empty: it attends to all that it sees.
  std::span<const int32_t> OfRow(int64_t row) const noexcept;
};

// The batch's rows that see at most top_k tokens, as the sequences of a batch; some have no tokens.
std::vector<SequenceRows> DenseRows(const Batch& batch, int top_k);

// The `count` largest of scores [positions], of equal ones the earlier: ascending positions. NaN is the smallest.
// scratch: [scores.size()]. count < scores.size().
void ChooseLargest(std::span<const float> scores, int count, int32_t* scratch, int32_t* positions) noexcept;

class TokenSelector {
 public:
  // layers: those with keys_only are used. ranks: those that divide the pages of keys, and gather scores; null: this
  // one has all. All arguments outlive the selector.
  TokenSelector(Device& device, const std::vector<LayerView>& layers, int top_k,
                const kernels::AttentionKernels& kernels, ThreadPool& threads, parallel::Communicator* ranks = nullptr);

  // Finds the sparse rows of a step, and reserves memory for their scores.
  void MakePlan(const Batch& batch, ChosenTokens& chosen) const;

  // f32 q [rows][heads * head_dim] with row stride `q_stride` floats, weights [rows][heads].
  struct Queries {
    const float* q = nullptr;
    int64_t q_stride = 0;
    const float* weights = nullptr;
  };
  void Select(const Batch& batch, int layer, const Queries& queries, ChosenTokens& chosen) noexcept;

 private:
  // A thread's queries, prepared for quantized and for exact records, and scores of a page.
  struct Workspace {
    Buffer memory;
    uint8_t* queries[2] = {};
    float* row_scale[2] = {};
    float* scores = nullptr;  // [kPassRows][kMaxPageTokens]
    uint8_t* kernel = nullptr;
  };
  void PrepareQueries(const LayerView& layer, const ScoreTask& task, const Queries& queries, const ChosenTokens& chosen,
                      Workspace& workspace) const noexcept;
  void Score(const LayerView& layer, const cache::PageRef* table, const ScoreTask& task, const Queries& queries,
             const ChosenTokens& chosen, float* scores, Workspace& workspace) const noexcept;

  bool HasPage(int64_t page) const noexcept { return ranks_ == nullptr || page % ranks_->Size() == ranks_->Rank(); }
  // Gets other ranks' scores of a wave's rows.
  void GatherScores(const ScoreWave& wave, ChosenTokens& chosen) const noexcept;

  const std::vector<LayerView>& layers_;
  const int top_k_;
  const kernels::AttentionKernels& kernels_;
  ThreadPool& threads_;
  parallel::Communicator* const ranks_;
  int page_size_ = 0;   // keys of a page
  int row_tokens_ = 1;  // tokens of a key
  int heads_ = 0;
  int64_t query_stride_ = 0;
  std::vector<Workspace> workspaces_;
};

}  // namespace kvanta::attention
