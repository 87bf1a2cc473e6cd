#include "engine/spec_decode.h"

#include <algorithm>
#include <new>

#include "kvanta/error.h"

namespace kvanta::engine {

SpecDecode::SpecDecode(DraftProposer& proposer, const SpecDecodeConfig& config)
    : proposer_(proposer),
      config_(config),
      accepted_per_position_(static_cast<size_t>(config.num_speculative_tokens)) {}

float SpecDecode::Propose(std::span<scheduler::Chunk> chunks, const scheduler::Scheduler& scheduler) {
  int64_t rows_left = kMaxStepRows;
  int64_t sequences = 0;
  for (const scheduler::Chunk& chunk : chunks) {
    rows_left -= chunk.tokens;
    sequences += RequestState::Of(*chunk.sequence).MaySpeculate() ? 1 : 0;
  }
  const float min_acceptance = MinAcceptance(sequences, kMaxStepRows - rows_left, DraftCost());
  rows_left = std::min({rows_left, config_.max_draft_rows, scheduler.BudgetLeft(), scheduler.DraftRowsLeft()});
  if (sequences == 0 || rows_left <= 0) return min_acceptance;
  try {
    ProposeFor(chunks, scheduler, rows_left, sequences, min_acceptance);
  } catch (const std::bad_alloc&) {  // a step works without drafts
  } catch (const ResourceError&) {   // the GPU failed
  }
  return min_acceptance;
}

// Time of a draft model's pass in those of the target; 0 without one.
float SpecDecode::DraftCost() const noexcept {
  if (config_.draft_cost) return *config_.draft_cost;
  const double pass = proposer_.PassSeconds();
  if (pass > 0 && row_seconds_.Value() > 0) return static_cast<float>(pass / row_seconds_.Value());
  return static_cast<float>(proposer_.Stats().weight_bytes) / static_cast<float>(config_.target_weight_bytes);
}

// Proposes draft tokens to follow the last tokens of `sequences` requests, at most `rows_left` in all.
void SpecDecode::ProposeFor(std::span<scheduler::Chunk> chunks, const scheduler::Scheduler& scheduler,
                            int64_t rows_left, int64_t sequences, float min_acceptance) {
  // A draft model's pauses save its work; a lookup costs nothing, and its pauses are counted in drafts.
  const bool is_model = proposer_.CacheSpec() != nullptr;
  const auto share = [&](int64_t requests) { return (rows_left + requests - 1) / requests; };
  items_.clear();
  chunks_.clear();
  for (scheduler::Chunk& chunk : chunks) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    if (!request.MaySpeculate()) continue;
    Speculation& speculation = request.speculation;
    // The last row's token is sampled after the draft.
    const int64_t tokens_left = std::min(request.sampler.Params().max_tokens - request.Produced(),
                                         config_.max_model_len - std::ssize(request.tokens));
    int64_t limit =
        std::min({scheduler.DraftSlots(chunk), tokens_left - 1, static_cast<int64_t>(config_.num_speculative_tokens)});
    if (is_model) {
      limit = speculation.control.Length(static_cast<int>(std::min(limit, share(sequences))), min_acceptance);
    }
    if (limit <= 0 || (is_model && !speculation.control.Speculates())) continue;
    if (!speculation.state) speculation.state = proposer_.MakeState(request.request.cache_salt);
    speculation.rows.assign(1, request.tokens.back());
    items_.push_back({.state = *speculation.state,
                      .tokens = request.tokens,
                      .count = static_cast<int>(limit),
                      .sampler = request.sampler,
                      .stop_tokens = request.stop_tokens,
                      .draft = speculation.rows});
    chunks_.push_back(&chunk);
  }
  proposer_.Propose(items_);
  auto requests = std::ssize(chunks_);
  for (scheduler::Chunk* chunk : chunks_) {
    Speculation& speculation = RequestState::Of(*chunk->sequence).speculation;
    const int64_t drafts = std::min(share(requests), std::ssize(speculation.rows) - 1);
    --requests;
    if (drafts <= 0 || (!is_model && !speculation.control.Speculates())) continue;
    speculation.rows.resize(static_cast<size_t>(drafts) + 1);
    chunk->drafts = static_cast<int>(drafts);
    rows_left -= drafts;
  }
}

void SpecDecode::Commit(RequestState& request, RequestOutput& output, int drafts, float min_acceptance) noexcept {
  const std::span<const int32_t> draft = std::span<const int32_t>(request.speculation.rows).subspan(1);
  const auto taken = static_cast<int>(output.tokens.size());
  if (request.pages.Length() > 0) request.pages.Extend(taken - 1);  // else preempted meanwhile
  output.draft_tokens = drafts;
  // A token that ends the request may be a draft token.
  output.accepted_tokens = static_cast<int>(std::ranges::mismatch(draft, output.tokens).in1 - draft.begin());
  request.speculation.control.Record(drafts, output.accepted_tokens, min_acceptance);
  ++drafts_;
  draft_tokens_ += drafts;
  accepted_tokens_ += output.accepted_tokens;
  for (int i = 0; i < output.accepted_tokens; ++i) ++accepted_per_position_[static_cast<size_t>(i)];
}

// A step works without drafts: without memory for them, there are none.
void SpecDecode::AddRows(RequestState& request, const scheduler::Chunk& chunk, int accepted,
                         const float* hidden) noexcept {
  if (request.pooler || request.request.constraint) return;
  try {
    Speculation& speculation = request.speculation;
    if (!speculation.state) speculation.state = proposer_.MakeState(request.request.cache_salt);
    target_rows_.push_back({.state = *speculation.state,
                            .tokens = request.tokens,
                            .start = chunk.start,
                            .count = chunk.tokens + accepted,
                            .hidden = hidden});
  } catch (const std::bad_alloc&) {
  }
}

void SpecDecode::PassRows() noexcept {
  try {
    proposer_.OnStep(target_rows_);
  } catch (const std::bad_alloc&) {
  } catch (const ResourceError&) {
  }
  target_rows_.clear();
}

void SpecDecode::RecordStep(int64_t rows, double seconds) noexcept {
  if (rows > kMaxStepRows) return;
  row_seconds_.Add(seconds / PassCost(rows));
}

void SpecDecode::Count(EngineStats& stats) const {
  stats.drafts = drafts_;
  stats.draft_tokens = draft_tokens_;
  stats.accepted_tokens = accepted_tokens_;
  stats.accepted_per_position = accepted_per_position_;
  const DraftModelStats draft = proposer_.Stats();
  stats.seconds_draft = draft.seconds;
  stats.draft_weight_bytes = draft.weight_bytes;
  stats.draft_cache_used_bytes = draft.cache_used_bytes;
  stats.draft_cache_budget_bytes = draft.cache_budget_bytes;
}

}  // namespace kvanta::engine
