// Source of draft tokens: proposes tokens that probably follow a sequence, which the engine verifies in one forward
// pass. Proposals change the speed alone, never a token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"
#include "runner/sampler.h"

namespace kvanta::engine {

// Figures of a draft model; all 0 for other sources.
struct DraftModelStats {
  double seconds = 0;  // spent on proposals
  int64_t weight_bytes = 0, cache_used_bytes = 0, cache_budget_bytes = 0;
};

class DraftProposer {
 public:
  // Kept for a request, from its first proposal to its end.
  class State {
   public:
    virtual ~State() = default;
  };

  // A decoding sequence of the step.
  struct Item {
    State& state;                          // made by MakeState
    std::span<const int32_t> tokens;       // prompt and output; they only grow between calls
    int count = 0;                         // maximum draft tokens, at least 1
    const runner::SamplerState& sampler;   // the one that verification uses
    std::span<const int32_t> stop_tokens;  // a draft ends with the first of them
    std::vector<int32_t>& draft;           // the draft tokens are appended to it
  };

  virtual ~DraftProposer() = default;
  // salt: isolates the request's prefix, as Request::cache_salt does.
  virtual std::unique_ptr<State> MakeState(const std::string& salt) = 0;
  // Appends draft tokens that may follow the items' tokens. Throws std::bad_alloc.
  virtual void Propose(std::span<Item> items) = 0;

  // Rows of a sequence that a step of the target has computed, and that stay in its cache.
  struct TargetRows {
    State& state;
    std::span<const int32_t> tokens;  // prompt and output: at least those before `start`, of the rows, and the next one
    int64_t start = 0;
    int count = 0;
    const float* hidden = nullptr;  // hidden states of the rows (models::Model::Forward), f32 [count][hidden]
  };
  // True if OnStep is to be called after each step.
  virtual bool ReadsHiddenStates() const noexcept { return false; }
  // Throws std::bad_alloc.
  virtual void OnStep(std::span<const TargetRows> /*rows*/) {}

  // The cache of a draft model, which shares the engine's budget; null: there is none.
  virtual const cache::KvCacheSpec* CacheSpec() const noexcept { return nullptr; }
  // Called once before the first proposal. Throws ResourceError.
  virtual void ReserveCache(cache::PagePoolConfig /*pool*/) {}
  virtual void ResetPrefixCache() {}
  // Seconds of a draft model's pass over one sequence; 0: a proposal costs next to nothing, or is not measured yet.
  virtual double PassSeconds() const noexcept { return 0; }
  virtual DraftModelStats Stats() const noexcept { return {}; }
};

}  // namespace kvanta::engine
