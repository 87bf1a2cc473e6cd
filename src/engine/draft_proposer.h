// Source of draft tokens: proposes tokens that probably follow a sequence, which the engine verifies in one forward
// pass. Proposals change the speed alone, never a token.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace kvanta::engine {

class DraftProposer {
 public:
  // Kept for a request, from its first proposal to its end.
  class State {
   public:
    virtual ~State() = default;
  };

  virtual ~DraftProposer() = default;
  virtual std::unique_ptr<State> MakeState() const = 0;
  // Appends at most `count` draft tokens that may follow `tokens`, prompt and output of the state's request. They only
  // grow between calls. Throws std::bad_alloc.
  virtual void Propose(State& state, std::span<const int32_t> tokens, int count, std::vector<int32_t>& draft) const = 0;
};

}  // namespace kvanta::engine
