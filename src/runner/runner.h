// A batch becomes one forward pass: token ids, positions and page tables in, hidden states and logits out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "attention/backend.h"
#include "base/device.h"
#include "models/model.h"

namespace kvanta::runner {

// New tokens of one sequence; the pages for [0, start + tokens.size()) exist.
struct RunItem {
  std::span<const int32_t> tokens;
  int64_t start = 0;
  cache::BlockTables pages = nullptr;
};

// What a row's logits are wanted for.
struct SampleRow {
  bool read = true;            // by the caller; else only to draw a token
  kernels::SampleParams draw;  // where it is not read
};

class Runner {
 public:
  // max_rows: of a Forward (the model was loaded for it). max_logit_rows: of a Logits. graphs: on a GPU, Forwards
  // whose items have one token each, and Logits with uses, are recorded and begun by one call; padded to a few numbers
  // of rows, to the same bits. Where memory has no room for graphs, there are none from then on.
  Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows, bool graphs = false);

  // Rows are the items' tokens in order. Throws what MakePlan throws; nothing is written then.
  void Forward(std::span<const RunItem> items, attention::Backend& backend);

  int64_t MaxRows() const noexcept { return max_rows_; }
  int64_t MaxLogitRows() const noexcept { return max_logit_rows_; }
  // Logits of chosen rows of the last Forward, f32 [rows.size()][vocab], valid until the next call. Where the device's
  // memory is not the host's (Draws()), rows that are not to be read are undefined where a token was drawn.
  // uses: of the rows, or none: all are read.
  std::span<float> Logits(std::span<const int64_t> rows, std::span<const SampleRow> uses = {});
  // Of the rows of the last Logits(rows).
  std::span<const kernels::RowArgmax> Argmaxes() const noexcept { return argmaxes_; }
  // Whether tokens are drawn where the logits are, and those of the last Logits(rows, uses); -1 where none was.
  bool Draws() const noexcept { return !model_.ops().OnHost(); }
  std::span<const int32_t> SampledTokens() const noexcept { return sampled_tokens_; }
  // Logits of rows [first, first + rows) of the last Forward, f32 [rows][vocab], into `out`.
  void Logits(int64_t first, int64_t rows, float* out);

 private:
  // Launches for so many rows; good for as long as what they were recorded with has the same version.
  struct CapturedGraph {
    uint64_t version = 0;
    std::unique_ptr<kernels::LaunchGraph> graph;
  };
  using Graphs = std::unordered_map<int64_t, CapturedGraph>;

  void Begin(Graphs& graphs, int64_t rows, uint64_t version, const std::function<void()>& launches);
  void Fetch(size_t rows, std::span<const SampleRow> uses);

  models::Model& model_;
  int64_t max_rows_;
  int64_t max_logit_rows_;
  bool graphs_;
  Graphs forwards_, sample_graphs_;  // Forward's, and those of Logits with uses
  // On the model's device:
  Buffer hidden_;        // f32 [max_rows][hidden]
  Buffer gathered_;      // f32 [max_logit_rows][hidden]
  Buffer logits_;        // f32 [max_logit_rows][vocab]
  Buffer inputs_;        // of Forward: positions, int64 [rows], then ids, int32 [rows]
  Buffer requested_;     // of Logits: where Draws() and asked to, SampleParams [rows]; then rows, int64 [rows]
  Buffer results_;       // RowArgmax [max_logit_rows], then drawn tokens, int32 [max_logit_rows]
  Buffer host_logits_;   // likewise, the host's copy of logits_,
  Buffer host_results_;  // and of results_
  std::unique_ptr<attention::Plan> plan_;
  attention::Backend* planned_for_ = nullptr;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> positions_;
  std::vector<attention::SequenceSpan> spans_;
  std::vector<kernels::RowArgmax> argmaxes_;
  std::vector<int64_t> rows_;
  std::vector<kernels::SampleParams> draws_;
  std::vector<int32_t> sampled_tokens_;
  std::vector<uint8_t> staged_;  // inputs_ or requested_, on the host
};

}  // namespace kvanta::runner
