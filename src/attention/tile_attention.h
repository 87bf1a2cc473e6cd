// Attends one tile of query rows to runs of cached pages, with the kernels of one ISA unit: prepares the queries, walks
// the pages by the page rule, keeps the online softmax. Memory: O(tile), one TileWorkspace per thread.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/work_list.h"
#include "base/device.h"
#include "kernels/cpu/attention_table.h"

namespace kvanta::attention {

using kernels::SoftmaxState;

// One layer as its tiles see it.
struct LayerView {
  const formats::LayerScheme* scheme = nullptr;
  const LayerAttention* attention = nullptr;
  const formats::LayerScales* scales = nullptr;
  const uint8_t* quantized = nullptr;  // base of the pool of quantized records
  const uint8_t* exact = nullptr;      // base of the pool of exact records
  int64_t quantized_bytes = 0;         // of a record
  int64_t exact_bytes = 0;
};

// Query rows of a sequence: f32 [tokens][heads * KeyDim()], row stride `stride` floats, from the tile's first token on.
struct QueryRows {
  const float* data = nullptr;
  int64_t stride = 0;
};

// What a worker needs for its tile.
class TileWorkspace {
 public:
  // Room for `rows` rows of any layer in `layers`. May throw (memory).
  void Reserve(Device& device, int rows, const std::vector<LayerView>& layers,
               const kernels::AttentionKernels& kernels);

  // Before the queries of another layer or step.
  void ForgetQueries() noexcept { prepared_ = nullptr; }

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
  SoftmaxState* run_state_ = nullptr;
  SoftmaxState* total_state_ = nullptr;
  float* run_out_ = nullptr;  // [rows][head_dim]
  float* total_out_ = nullptr;
  float* rescale_ = nullptr;  // [kPassRows]
  float* scores_ = nullptr;   // [kPassRows][kMaxPageTokens]
  float* plain_scores_ = nullptr;
  uint8_t* room_ = nullptr;
  uint8_t* values_ = nullptr;  // codes of a page of latents, in V's order
};

class TileAttention {
 public:
  TileAttention(const kernels::AttentionKernels& kernels, const LayerView& layer, const Tile& tile,
                const cache::PageRef* pages, TileWorkspace& workspace) noexcept;

  // Transforms and prepares the tile's query rows to attend runs [first, last), whose first pages it touches.
  void PrepareQueries(QueryRows q, int64_t first, int64_t last) noexcept;

  // Attends these runs one after the other and writes the finished rows: out f32 [tokens][heads * head_dim].
  void Finish(int64_t first, int64_t last, float* out) noexcept;

  // Attends one run; its partial result: states [rows], out [rows][head_dim].
  void Partial(int64_t run, SoftmaxState* states, float* out) noexcept;

  // Merges partial results of `runs` runs, [run][rows], in order, and writes the finished rows of KV head `head` of the
  // tile's.
  void MergePartials(int head, int64_t runs, const SoftmaxState* states, const float* partial, float* out) noexcept;

 private:
  // Where one side of the tile's first KV head lies in a page record: offsets in bytes.
  struct CellSide {
    formats::Code code = formats::Code::kBf16;
    int tokens = 0;
    int head_dim = 0;
    int64_t bytes = 0;  // of the cell
    int64_t codes = 0;
    formats::Scaling scaling = {};
    int64_t block_scales = 0;  // the planes that `scaling` names
    int64_t block_zeros = 0;
    int64_t token_scales = 0;
    int64_t token_zeros = 0;
    int64_t channel_scales = 0;
    int64_t channel_zeros = 0;
    kernels::CellView At(const uint8_t* record) const noexcept;
  };
  struct PageCells {
    CellSide k, v;
    CellSide plain;          // channels of K; no bytes without
    int64_t head_bytes = 0;  // from a KV head's cells to the next one's
  };
  // A page of one KV head as the page rule has the tile read it.
  struct PageView {
    const PageCells* cells;
    const uint8_t* record;  // whose cells are the head's
    int head;               // of the tile's, from 0
    bool exact;
  };
  // What is read of a page of a head first, and what is read later.
  struct Span {
    const uint8_t* begin = nullptr;
    int64_t bytes = 0;
  };
  struct Spans {
    Span start, rest;
  };
  // What the kernels touch while they attend a page of a head, so that memory never rests: the rest of the page and the
  // start of the next one. No more than that: the first-level cache has no room for a whole page beside the current
  // one.
  struct Ahead {
    kernels::Prefetch scoring, weighing, adding;
  };
  static constexpr Ahead kNothingAhead = {};
  static CellSide SideOf(const formats::Side& side, formats::CellShape shape, int64_t cell) noexcept;
  void PrepareHead(QueryRows q, int head, bool for_quantized, bool for_exact) noexcept;
  PageView View(int64_t page, int head) const noexcept;
  Spans SpansOf(int64_t page, int head) const noexcept;
  Ahead AheadOf(int64_t page, int head) const noexcept;
  void AttendRun(int64_t run) noexcept;
  void TurnLatents(int64_t page, const PageView& view, int tokens) noexcept;
  void AttendPage(int64_t page, const PageView& view, const Ahead& ahead, int tokens) noexcept;
  void ScoreRows(const PageView& view, int groups, int first_row, int rows, kernels::Visit visit,
                 const kernels::Prefetch& prefetch) noexcept;
  void AttendRows(const PageView& view, int begin, int end, int first_row, int rows, kernels::Visit visit,
                  const Ahead& ahead) noexcept;
  void WriteRow(int row, const SoftmaxState& state, const float* sums, float* out) noexcept;
  int HeadRows() const noexcept { return tile_.tokens * group_; }
  int Rows() const noexcept { return tile_.kv_heads * HeadRows(); }

  const kernels::AttentionKernels& kernels_;
  const LayerView& layer_;
  const Tile& tile_;
  const cache::PageRef* pages_;
  TileWorkspace& work_;
  int group_;  // query heads of the KV head
  int head_dim_;
  int page_size_;
  int64_t own_page_;
  PageCells quantized_;
  PageCells exact_;
  int64_t ahead_end_ = 0;  // page where touching ends
};

}  // namespace kvanta::attention
