// A request inside the engine, from Add to its last output.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvanta/engine.h"
#include "runner/sampler.h"
#include "scheduler/sequence.h"

namespace kvanta::engine {

inline constexpr double kNoDeadline = std::numeric_limits<double>::infinity();

// Seconds of the clock of RequestTimes.
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct RequestState {
  RequestState(Request requested, std::vector<int32_t> stops, uint64_t seed, cache::KvCacheManager& cache)
      : request(std::move(requested)),
        stop_tokens(std::move(stops)),
        sampler(request.sampling, seed, request.prompt, stop_tokens),
        sequence(cache, request.cache_salt),
        grammar_tokens(PromptTokens()) {
    sequence.tokens = request.prompt;
    sequence.tokens.reserve(request.prompt.size() + static_cast<size_t>(std::min(request.sampling.max_tokens, 1024)));
    sequence.priority = request.priority;
    sequence.skip_prefix_match = WantsPromptLogprobs();
    if (WantsPromptLogprobs()) prompt_logprobs.resize(request.prompt.size());
    times.added = Now();
    if (request.timeout_seconds > 0) deadline = times.added + request.timeout_seconds;
  }

  int64_t PromptTokens() const noexcept { return static_cast<int64_t>(request.prompt.size()); }
  int64_t Produced() const noexcept { return static_cast<int64_t>(sequence.tokens.size()) - PromptTokens(); }
  bool WantsPromptLogprobs() const noexcept { return request.sampling.prompt_logprobs >= 0; }
  bool Stops(int32_t token) const noexcept {
    return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
  }
  RequestOutput Output() const {
    RequestOutput output;
    output.id = request.id;
    output.cached_tokens = static_cast<int>(std::max<int64_t>(0, sequence.cached_tokens));
    output.preemptions = sequence.preemptions;
    output.times = times;
    return output;
  }

  Request request;
  RequestTimes times;
  double deadline = kNoDeadline;     // on the same clock
  int64_t counted = 0;               // prompt tokens that the statistics have seen
  std::vector<int32_t> stop_tokens;  // the model's end-of-sequence ids (unless ignored) and the request's
  runner::SamplerState sampler;
  scheduler::Sequence sequence;
  int64_t grammar_tokens;  // tokens of the sequence that are the prompt's or known to the constraint
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // by position; given out with the first token
  std::string failure;                                     // set when the request cannot go on
};

}  // namespace kvanta::engine
