// Speculative decoding: drafts of a step before its forward pass, and their commit after it.
#include <algorithm>
#include <new>

#include "engine/engine_impl.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

// Rows of a step up to which draft tokens are computed with it. Beyond, a step is bound by arithmetic rather than by
// reading weights, and a row costs its full share.
constexpr int64_t kMaxStepRows = 64;

}  // namespace

// Adds draft tokens to the step's decoding sequences, in equal shares of the rows left in it.
void Engine::Impl::ProposeDrafts(StepBatch& batch) {
  if (!components_.proposer) return;
  int64_t rows_left = kMaxStepRows;
  int64_t sequences = 0;
  for (const scheduler::Chunk& chunk : batch.chunks) {
    rows_left -= chunk.tokens;
    sequences += RequestState::Of(*chunk.sequence).MaySpeculate() ? 1 : 0;
  }
  batch.min_acceptance = engine::MinAcceptance(sequences, kMaxStepRows - rows_left, DraftCost());
  rows_left = std::min(rows_left, scheduler_->BudgetLeft());
  if (sequences == 0 || rows_left <= 0) return;
  try {
    Propose(batch, rows_left, sequences);
  } catch (const std::bad_alloc&) {  // a step works without drafts
  } catch (const ResourceError&) {   // of a GPU
  }
}

// Time of a draft model's pass in those of the target; 0 without one.
float Engine::Impl::DraftCost() const noexcept {
  if (components_.draft_cost) return *components_.draft_cost;
  const double pass = components_.proposer->PassSeconds();
  if (pass > 0 && row_seconds_.Value() > 0) return static_cast<float>(pass / row_seconds_.Value());
  return static_cast<float>(components_.proposer->Stats().weight_bytes) /
         static_cast<float>(components_.model->WeightBytes());
}

// Proposes draft tokens behind the last tokens of `sequences` requests, at most `rows_left` in all.
void Engine::Impl::Propose(StepBatch& batch, int64_t rows_left, int64_t sequences) {
  // A draft model's pauses save its work; a lookup costs nothing, and its pauses are counted in drafts.
  const bool is_model = components_.proposer->CacheSpec() != nullptr;
  const auto share = [&](int64_t requests) { return (rows_left + requests - 1) / requests; };
  draft_items_.clear();
  draft_chunks_.clear();
  for (scheduler::Chunk& chunk : batch.chunks) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    if (!request.MaySpeculate()) continue;
    engine::Speculation& speculation = request.speculation;
    // The last row's token is sampled behind the draft.
    const int64_t tokens_left = std::min(request.sampler.Params().max_tokens - request.Produced(),
                                         components_.config.max_model_len - std::ssize(request.tokens));
    int64_t limit = std::min(
        {scheduler_->DraftSlots(chunk), tokens_left - 1, static_cast<int64_t>(components_.num_speculative_tokens)});
    if (is_model) {
      limit = speculation.control.Length(static_cast<int>(std::min(limit, share(sequences))), batch.min_acceptance);
    }
    if (limit <= 0 || (is_model && !speculation.control.Speculates())) continue;
    if (!speculation.state) speculation.state = components_.proposer->MakeState(request.request.cache_salt);
    speculation.rows.assign(1, request.tokens.back());
    draft_items_.push_back({.state = *speculation.state,
                            .tokens = request.tokens,
                            .count = static_cast<int>(limit),
                            .sampler = request.sampler,
                            .stop_tokens = request.stop_tokens,
                            .draft = speculation.rows});
    draft_chunks_.push_back(&chunk);
  }
  components_.proposer->Propose(draft_items_);
  auto requests = std::ssize(draft_chunks_);
  for (scheduler::Chunk* chunk : draft_chunks_) {
    engine::Speculation& speculation = RequestState::Of(*chunk->sequence).speculation;
    const int64_t drafts = std::min(share(requests), std::ssize(speculation.rows) - 1);
    --requests;
    if (drafts <= 0 || (!is_model && !speculation.control.Speculates())) continue;
    speculation.rows.resize(static_cast<size_t>(drafts) + 1);
    chunk->drafts = static_cast<int>(drafts);
    rows_left -= drafts;
  }
}

// Records the time that a prompt's token takes, which loads of stored pages are compared with, and that of a small
// step's row, which a draft model's pass is.
void Engine::Impl::RecordStepSeconds(const StepBatch& batch) {
  int64_t rows = 0;
  for (const runner::RunItem& item : batch.items) rows += std::ssize(item.tokens);
  if (tiers_ && components_.config.role != "decode") tiers_->RecordStep(rows, batch.seconds);
  if (rows > kMaxStepRows) return;
  row_seconds_.Add(batch.seconds / engine::PassCost(rows));
}

// Commits and counts a verified draft of `drafts` tokens: all but the last of the step's tokens are in the cache.
void Engine::Impl::CountDraft(RequestState& request, RequestOutput& output, int drafts, float min_acceptance) noexcept {
  const std::span<const int32_t> draft = std::span<const int32_t>(request.speculation.rows).subspan(1);
  const auto taken = static_cast<int>(output.tokens.size());
  if (request.pages.Length() > 0) request.pages.Extend(taken - 1);  // else preempted meanwhile
  output.draft_tokens = drafts;
  // A token that ends the request may be a draft token.
  output.accepted_tokens = static_cast<int>(std::ranges::mismatch(draft, output.tokens).in1 - draft.begin());
  request.speculation.control.Record(drafts, output.accepted_tokens, min_acceptance);
  ++counters_.drafts;
  counters_.draft_tokens += drafts;
  counters_.accepted_tokens += output.accepted_tokens;
  for (int i = 0; i < output.accepted_tokens; ++i) ++counters_.accepted_per_position[static_cast<size_t>(i)];
}

}  // namespace kvanta
