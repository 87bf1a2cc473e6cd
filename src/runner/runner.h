// Runs a batch as one forward pass: token ids, positions and page tables in, hidden states and logits out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "base/device.h"
#include "models/model.h"
#include "runner/rank_steps.h"
#include "runner/sample_row.h"

namespace kvanta::runner {

// New tokens of one sequence; the pages for [0, start + tokens.size()) exist.
struct RunItem {
  std::span<const int32_t> tokens;
  int64_t start = 0;
  cache::BlockTables pages = nullptr;
  int64_t first_output = 0;  // first of `tokens` with logits; tokens.size(): none has
  int drafts = 0;            // the last of `tokens`, which may be rejected (AcceptDrafts)
  // Inputs of a predictor (models::LoadPredictor): the hidden states before the tokens, f32 [tokens][hidden], on the
  // host.
  const float* hidden = nullptr;
};

// CUDA graphs of decode steps and sampling on a GPU, padded to a few numbers of rows, with the same bits.
enum class Graphs : uint8_t {
  kNone,
  kIfMemory,  // launches go on one by one when memory for graphs runs out
  kRequired,  // ranks capture and launch them together, or none does: ResourceError when memory runs out
};

class Runner {
 public:
  // max_rows: rows of a Forward, for which the model was loaded. max_logit_rows: rows of a Logits.
  Runner(models::Model& model, int64_t max_rows, int64_t max_logit_rows, Graphs graphs = Graphs::kNone);

  // Rank 0: other ranks repeat every step from now on. Methods then also throw RankLostError, once a rank is lost.
  // Throws ResourceError.
  void SetStepSender(std::unique_ptr<StepSender> sender);
  // A pipeline's rank above 0: hidden states come from the rank before it, and go to the next one.
  void SetPipeline(parallel::Communicator& pipeline) noexcept { pipeline_ = &pipeline; }

  // Keeps the hidden states of all rows from now on. Only on the host, without other ranks.
  void KeepHiddenStates();
  // Hidden states of all rows of the last Begin, after KeepHiddenStates, f32 [rows][hidden].
  const float* AllHiddenStates() const noexcept { return all_hidden_.as<float>(); }

  // A batch that Begin has taken.
  using Ticket = int64_t;
  // Computes the output rows: those of the items' tokens from first_output on, in order. In a pipeline, this rank's
  // layers alone, while others may run earlier batches: up to StepSender::Depth() of them, and one more.
  // Throws what MakePlan throws; nothing is written then.
  Ticket Begin(std::span<const RunItem> items, attention::Backend& backend);
  // Waits for a batch, which is the last Forward to the other methods from then on.
  void Finish(Ticket ticket);
  void Forward(std::span<const RunItem> items, attention::Backend& backend) { Finish(Begin(items, backend)); }

  // Advances the states of recurrent layers over the accepted drafts of the last Forward with this backend: the first
  // accepted[i] ones of item i. Not with other ranks.
  void AcceptDrafts(std::span<const int> accepted, attention::Backend& backend) noexcept;

  int64_t MaxRows() const noexcept { return max_rows_; }
  int64_t MaxLogitRows() const noexcept { return max_logit_rows_; }
  // True on a GPU: rows with device_params are sampled there, and their logits are not copied to the host.
  bool SamplesOnDevice() const noexcept { return !model_.ops().OnHost(); }

  // Logits of output rows [first, first + count) of the last Forward, f32 [count][vocab], valid until the next call.
  std::span<float> Logits(int64_t first, int64_t count);
  // Sets the logits of `rows`, which are output rows [first, first + rows.size()) of the last Forward, valid until the
  // next call, or samples them on the device.
  void Logits(int64_t first, std::span<SampleRow> rows);
  // Logits of output rows [first, first + count) of the last Forward into `out`, f32 [count][vocab].
  void Logits(int64_t first, int64_t count, float* out);
  // Another rank's part in Logits of rank 0 (StepSender::SendLogits). Waits for a GPU, and throws its errors.
  void FollowLogits(int64_t first, int64_t count, bool for_samples);
  // Hidden states of output rows [first, first + count) of the last Forward, as Model::Forward gives them, f32
  // [count][hidden], valid until the next call.
  std::span<const float> HiddenStates(int64_t first, int64_t count);
  // Replaces the hidden state of an output row of the last Forward, on the host.
  void SetHiddenState(int64_t row, std::span<const float> values) noexcept;

 private:
  // Computes logits on this rank, and on the others if they repeat its steps.
  void ModelLogits(int64_t first, int64_t count, float* out, kernels::RowArgmax* argmaxes);

  // Launches for a number of rows; valid while the plan that they were captured with has the same version.
  struct CapturedGraph {
    uint64_t version = 0;
    std::unique_ptr<kernels::LaunchGraph> graph;
  };
  using CapturedGraphs = std::unordered_map<int64_t, CapturedGraph>;

  // Batches of rank 0 whose hidden states are on their way through a pipeline, and their places.
  struct Slot {
    int64_t output_rows = 0;
    bool arrived = true;
    Buffer hidden;  // f32 [max_rows][hidden], output rows first
  };
  Slot& SlotOf(Ticket ticket) noexcept { return slots_[static_cast<size_t>(ticket) % slots_.size()]; }
  int64_t HiddenFloats(int64_t rows) const noexcept { return rows * model_.Config().hidden; }
  int64_t BytesOfRows(int64_t rows) const noexcept { return HiddenFloats(rows) * static_cast<int64_t>(sizeof(float)); }
  std::optional<CpuScope> StepCpus() const {
    if (sender_) return std::optional<CpuScope>(std::in_place, sender_->Cpus());
    return std::nullopt;
  }

  void ReplayOrCapture(CapturedGraphs& graphs, int64_t rows, uint64_t version, const std::function<void()>& launches);
  // Sets sampled_rows_ to these output rows, padded to those of a graph, and sample_params_ to none.
  void SetSampledRows(int64_t first, int64_t count);
  // Launches logits of sampled_rows_, and their samples by sample_params_ or not.
  void LaunchLogits(bool samples);
  void SampleOnDevice(int64_t first, std::span<SampleRow> rows);
  void FetchSamples(std::span<SampleRow> rows);

  models::Model& model_;
  std::unique_ptr<StepSender> sender_;          // null: no other rank repeats the steps
  parallel::Communicator* pipeline_ = nullptr;  // null: this rank has all layers
  int64_t max_rows_;
  int64_t max_logit_rows_;
  Graphs graphs_;
  CapturedGraphs forward_graphs_, sample_graphs_;
  std::vector<Slot> slots_;  // one, but for rank 0 of a pipeline
  Ticket next_ = 0;
  // On the model's device:
  float* hidden_ = nullptr;  // hidden states in the slot of the last Forward
  Buffer logits_;            // f32 [max_logit_rows][vocab]
  Buffer all_hidden_;        // f32 [max_rows][hidden] with KeepHiddenStates(); else empty
  Buffer inputs_;            // Forward's positions and output rows, int64 [2 * max_rows], then ids, int32 [max_rows]
  // With SamplesOnDevice():
  Buffer gathered_;       // f32 [max_logit_rows][hidden]
  Buffer sample_inputs_;  // SampleParams [rows], then rows, int64 [rows]
  Buffer samples_;        // RowArgmax [max_logit_rows], then tokens, int32 [max_logit_rows]
  Buffer host_logits_;    // copy of logits_ on the host
  Buffer host_samples_;   // copy of samples_ on the host
  std::unique_ptr<attention::Plan> plan_;
  attention::Backend* planned_for_ = nullptr;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> positions_;
  std::vector<int64_t> output_rows_;
  std::vector<int64_t> sampled_rows_;  // output rows that are sampled on the device, padded to a bucket
  std::vector<attention::SequenceSpan> spans_;
  std::vector<kernels::RowArgmax> argmaxes_;
  std::vector<kernels::SampleParams> sample_params_;
  std::vector<float> host_hidden_;  // copy of rows of hidden_ on the host
  std::vector<uint8_t> staged_;     // inputs_ or sample_inputs_, on the host
};

}  // namespace kvanta::runner
