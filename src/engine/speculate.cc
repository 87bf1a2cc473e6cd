// Speculative decoding: drafts of a step before its forward pass, and their commit after it.
#include <algorithm>
#include <new>

#include "engine/engine_impl.h"

namespace kvanta {
namespace {

// Rows of a step up to which draft tokens are computed with it. Beyond, a step is bound by arithmetic rather than by
// reading weights, and a row costs its full share.
constexpr int64_t kMaxStepRows = 64;

}  // namespace

// Adds draft tokens to the step's decoding sequences, in equal shares of the rows left in it.
void Engine::Impl::ProposeDrafts() {
  if (!components_.proposer) return;
  int64_t rows_left = kMaxStepRows;
  int64_t requests = 0;
  for (const scheduler::Chunk& chunk : chunks_) {
    rows_left -= chunk.tokens;
    requests += RequestState::Of(*chunk.sequence).MaySpeculate() ? 1 : 0;
  }
  min_acceptance_ = engine::MinAcceptance(requests, kMaxStepRows - rows_left);
  rows_left = std::min(rows_left, scheduler_->BudgetLeft());
  for (scheduler::Chunk& chunk : chunks_) {
    RequestState& request = RequestState::Of(*chunk.sequence);
    if (rows_left <= 0) return;
    if (!request.MaySpeculate()) continue;
    const int64_t share = (rows_left + requests - 1) / requests;
    --requests;
    chunk.drafts = Draft(request, static_cast<int>(std::min(share, scheduler_->DraftSlots(chunk))));
    rows_left -= chunk.drafts;
  }
}

// Proposes at most `limit` draft tokens behind the request's last token. Returns their number.
int Engine::Impl::Draft(RequestState& request, int limit) {
  engine::Speculation& speculation = request.speculation;
  // The last row's token is sampled behind the draft.
  const int64_t tokens_left = std::min(request.sampler.Params().max_tokens - request.Produced(),
                                       components_.config.max_model_len - std::ssize(request.tokens));
  limit = static_cast<int>(std::min<int64_t>({limit, components_.num_speculative_tokens, tokens_left - 1}));
  if (limit <= 0) return 0;
  try {
    if (!speculation.state) speculation.state = components_.proposer->MakeState();
    speculation.rows.assign(1, request.tokens.back());
    components_.proposer->Propose(*speculation.state, request.tokens, limit, speculation.rows);
  } catch (const std::bad_alloc&) {  // a step works without drafts
    return 0;
  }
  const int drafts = static_cast<int>(speculation.rows.size()) - 1;
  return drafts > 0 && speculation.control.Speculates() ? drafts : 0;
}

// Commits and counts a verified draft of `drafts` tokens: all but the last of the step's tokens are in the cache.
void Engine::Impl::CountDraft(RequestState& request, RequestOutput& output, int drafts) noexcept {
  const std::span<const int32_t> draft = std::span<const int32_t>(request.speculation.rows).subspan(1);
  const auto taken = static_cast<int>(output.tokens.size());
  request.pages.Extend(taken - 1);
  output.draft_tokens = drafts;
  // A token that ends the request may be a draft token.
  output.accepted_tokens = static_cast<int>(std::ranges::mismatch(draft, output.tokens).in1 - draft.begin());
  request.speculation.control.Record(drafts, output.accepted_tokens, min_acceptance_);
  ++counters_.drafts;
  counters_.draft_tokens += drafts;
  counters_.accepted_tokens += output.accepted_tokens;
  for (int i = 0; i < output.accepted_tokens; ++i) ++counters_.accepted_per_position[static_cast<size_t>(i)];
}

}  // namespace kvanta
