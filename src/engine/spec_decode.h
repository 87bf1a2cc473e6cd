// Speculative decoding in the engine's steps: asks a proposer for draft tokens of the decoding sequences, as many as
// pay, and commits those that verification has accepted. Needs the step lock.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "base/moving_mean.h"
#include "engine/draft_control.h"
#include "engine/draft_proposer.h"
#include "engine/request_state.h"
#include "kvanta/engine.h"
#include "scheduler/scheduler.h"

namespace kvanta::engine {

// Rows of a step up to which draft tokens are computed with it. Beyond, a step is bound by arithmetic rather than by
// reading weights, and a row costs its full share.
inline constexpr int64_t kMaxStepRows = 64;

struct SpecDecodeConfig {
  int num_speculative_tokens = 0;                                // maximum draft tokens of a sequence in a step
  int64_t max_model_len = 0;                                     // tokens of a sequence
  int64_t max_draft_rows = std::numeric_limits<int64_t>::max();  // draft tokens of a step
  int64_t target_weight_bytes = 0;  // bytes of the model that verifies, compared with a draft model's until both ran
  std::optional<float> draft_cost = {};  // for tests: that of MinAcceptance, which is measured otherwise
};

class SpecDecode {
 public:
  // `proposer` must outlive the object.
  SpecDecode(DraftProposer& proposer, const SpecDecodeConfig& config);

  // Adds draft tokens to the decoding sequences among `chunks`, those of the scheduler's last Schedule(), in equal
  // shares of the rows left in the step. Where memory for drafts is short, there are none. Returns the share of draft
  // tokens that must be accepted to pay in this step.
  float Propose(std::span<scheduler::Chunk> chunks, const scheduler::Scheduler& scheduler);
  // Commits and counts a verified draft of `drafts` tokens: all but the last of the output's tokens are in the cache.
  void Commit(RequestState& request, RequestOutput& output, int drafts, float min_acceptance) noexcept;
  // For a proposer that reads hidden states: AddRows for each chunk of a finished step whose request goes on, then
  // PassRows. `hidden`: f32 [chunk.tokens + drafts][hidden].
  bool ReadsHiddenStates() const noexcept { return proposer_.ReadsHiddenStates(); }
  void AddRows(RequestState& request, const scheduler::Chunk& chunk, int accepted, const float* hidden) noexcept;
  void PassRows() noexcept;
  // Measures the target by a step of `rows` rows, which took `seconds` in it. Large steps say nothing.
  void RecordStep(int64_t rows, double seconds) noexcept;

  // Sets the counters of speculative decoding and the figures of a draft model. Does not allocate where
  // accepted_per_position has its size.
  void Count(EngineStats& stats) const;

 private:
  float DraftCost() const noexcept;
  void ProposeFor(std::span<scheduler::Chunk> chunks, const scheduler::Scheduler& scheduler, int64_t rows_left,
                  int64_t sequences, float min_acceptance);

  DraftProposer& proposer_;
  const SpecDecodeConfig config_;
  MovingMean row_seconds_{kCostWeight};  // forward pass and logits of one row
  int64_t drafts_ = 0, draft_tokens_ = 0, accepted_tokens_ = 0;
  std::vector<int64_t> accepted_per_position_;  // [num_speculative_tokens]
  // Scratch of a step.
  std::vector<DraftProposer::Item> items_;
  std::vector<scheduler::Chunk*> chunks_;  // chunks of items_
  std::vector<DraftProposer::TargetRows> target_rows_;
};

}  // namespace kvanta::engine
