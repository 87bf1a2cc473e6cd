// A request inside the engine, from Add to its last output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvanta/engine.h"
#include "runner/sampler.h"
#include "scheduler/sequence.h"

namespace kvanta::engine {

struct RequestState {
  RequestState(Request wanted, std::vector<int32_t> stops, uint64_t seed, cache::PageStore& store,
               cache::PrefixTree* tree, const cache::PageDemand& demand)
      : request(std::move(wanted)),
        stop_tokens(std::move(stops)),
        sampler(request.sampling, seed, request.prompt, stop_tokens),
        sequence(store, tree, demand, request.cache_salt) {
    sequence.tokens = request.prompt;
    sequence.tokens.reserve(request.prompt.size() + static_cast<size_t>(std::min(request.sampling.max_tokens, 1024)));
    sequence.priority = request.priority;
    sequence.skip_prefix_match = WantsPromptLogprobs();
    if (WantsPromptLogprobs()) prompt_logprobs.resize(request.prompt.size());
  }

  int64_t PromptTokens() const noexcept { return static_cast<int64_t>(request.prompt.size()); }
  int64_t Produced() const noexcept { return static_cast<int64_t>(sequence.tokens.size()) - PromptTokens(); }
  bool WantsPromptLogprobs() const noexcept { return request.sampling.prompt_logprobs >= 0; }
  bool Stops(int32_t token) const noexcept {
    return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
  }

  Request request;
  std::vector<int32_t> stop_tokens;  // the model's end-of-sequence ids (unless ignored) and the request's
  runner::SamplerState sampler;
  scheduler::Sequence sequence;
  std::vector<std::vector<TokenLogprob>> prompt_logprobs;  // by position; given out with the first token
  std::string failure;                                     // set when the request cannot go on
};

}  // namespace kvanta::engine
