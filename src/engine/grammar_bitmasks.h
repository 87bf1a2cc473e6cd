// Masks of the tokens that the constrained requests of a step may take, from one BitmaskFn call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request_state.h"

namespace kvanta::engine {

class GrammarBitmasks {
 public:
  // fill may be empty when no request has a constraint.
  GrammarBitmasks(BitmaskFn fill, int64_t vocab);

  // Starts a step.
  void Clear() noexcept { requests_.clear(); }
  // Adds a request whose next token will be sampled. Its mask has the next index, if it has a constraint.
  void Add(RequestState& request);
  // Computes the masks. A request whose mask has an error gets it as its failure, and its mask allows nothing.
  void Fill();
  std::span<const uint32_t> Mask(size_t index) const noexcept;

 private:
  BitmaskFn fill_;
  size_t words_;
  std::vector<RequestState*> requests_;
  std::vector<MaskTask> tasks_;
  std::vector<uint32_t> masks_;  // [requests][words]
};

}  // namespace kvanta::engine
