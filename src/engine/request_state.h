// A request inside the engine, from Add to its last output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "engine/draft_control.h"
#include "engine/draft_proposer.h"
#include "kvanta/engine.h"
#include "runner/pooler.h"
#include "runner/sampler.h"
#include "scheduler/sequence.h"
#include "store/record_store.h"

namespace kvanta::engine {

inline constexpr double kNoDeadline = std::numeric_limits<double>::infinity();

// Speculative decoding of one request.
struct Speculation {
  std::unique_ptr<DraftProposer::State> state;  // null before the first proposal
  DraftControl control;
  std::vector<int32_t> rows;  // rows of a step with a draft: the sequence's last token, then the draft tokens
};

// Load of a waiting request's prefix from the tiers below the memory.
struct PrefixLoad {
  store::RecordStore::LoadHandle handle;  // null: none
  double deadline = 0, progress = 0;      // on the clock of the tiers: end of patience, time of the last page
};

// State of the memory when a request was last looked up in them.
struct LastLookup {
  int preemptions = 0;    // preemptions of the request
  int64_t evictions = 0;  // evictions from the prefix cache
  int64_t pages = 0;      // the request's pages that the prefix cache had
};

struct RequestState : scheduler::Sequence, std::enable_shared_from_this<RequestState> {
  RequestState(Request requested, std::vector<int32_t> stops, uint64_t seed, cache::KvCacheManager& cache)
      : Sequence(cache, requested.cache_salt),
        request(std::move(requested)),
        stop_tokens(std::move(stops)),
        sampler(request.sampling, seed, request.prompt, stop_tokens),
        grammar_tokens(PromptTokens()) {
    tokens = request.prompt;
    for (const int32_t token : request.generated) sampler.Append(token);
    if (!request.generated.empty()) request.sampling.prompt_logprobs = -1;  // given out before
    tokens.reserve(request.prompt.size() + static_cast<size_t>(std::min(request.sampling.max_tokens, 1024)));
    tokens.insert(tokens.end(), request.generated.begin(), request.generated.end());
    priority = request.priority;
    user = request.user;
    logits_of_prompt = WantsPromptLogprobs();
    skip_prefix_match = WantsPromptLogprobs() || request.sampling.skip_reading_prefix_cache;
    if (request.sampling.kv_cache_events) {
      pages.Replay(*request.sampling.kv_cache_events, std::numeric_limits<int64_t>::max());
      skip_prefix_match = true;
    }
    if (WantsPromptLogprobs()) prompt_logprobs.resize(request.prompt.size());
    times.added = added = Now();
    if (request.timeout_seconds > 0) deadline = times.added + request.timeout_seconds;
  }

  // The request of a sequence that the scheduler returned: every sequence of an engine is one.
  static RequestState& Of(scheduler::Sequence& sequence) noexcept { return static_cast<RequestState&>(sequence); }

  int64_t PromptTokens() const noexcept { return static_cast<int64_t>(request.prompt.size()); }
  int64_t Produced() const noexcept { return static_cast<int64_t>(tokens.size()) - PromptTokens(); }
  bool WantsPromptLogprobs() const noexcept { return request.sampling.prompt_logprobs >= 0; }
  bool Stops(int32_t token) const noexcept {
    return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
  }
  // True in a decode step, unless a constraint needs each token before it gives the next mask.
  bool MaySpeculate() const noexcept { return Produced() > 0 && Remaining() == 1 && !request.constraint; }
  RequestOutput Output() const {
    RequestOutput output = OutputOf(request.id);
    output.kv_cache = pages.Record();
    return output;
  }
  // Takes the id, so that it needs no memory: once, when the request has been released.
  RequestOutput LastOutput(FinishReason finish, std::string error) noexcept {
    RequestOutput output = OutputOf(std::move(request.id));
    output.finish = finish;
    output.error = std::move(error);
    output.invalid_input = invalid_input;
    return output;
  }

  Request request;
  RequestTimes times;
  double deadline = kNoDeadline;     // on the clock of Now()
  int64_t counted = 0;               // prompt tokens that the statistics include
  std::vector<int32_t> stop_tokens;  // the model's end-of-sequence ids (unless ignored) and the request's
  runner::SamplerState sampler;
  Speculation speculation;
  PrefixLoad load;
  LastLookup last_lookup;
  std::optional<runner::Pooler> pooler;  // only for a request with pooling
  int64_t grammar_tokens;                // tokens that are the prompt's or were passed to the constraint
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // by position; given out with the first token
  std::string failure;                                     // set when the request cannot go on
  bool invalid_input = false;                              // `failure` is the request's own fault
  bool has_ended = false;  // its last output is given out, while a step that is in flight may have it

 private:
  RequestOutput OutputOf(std::string id) const noexcept {
    RequestOutput output;
    output.id = std::move(id);
    output.cached_tokens = static_cast<int>(std::max<int64_t>(0, cached_tokens));
    output.preemptions = preemptions;
    output.times = times;
    return output;
  }
};

}  // namespace kvanta::engine
