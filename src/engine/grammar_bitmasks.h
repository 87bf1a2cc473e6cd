// The masks of a step's constrained requests: one call of the filler for all of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/request_state.h"

namespace kvanta::engine {

class GrammarBitmasks {
 public:
  // fill may be empty: then no request is ever given to it.
  GrammarBitmasks(BitmaskFn fill, int64_t vocab);

  // Begins a step.
  void Clear() noexcept { requests_.clear(); }
  // A request whose next token will be sampled; returns the number of its mask, -1 without a constraint.
  int Want(RequestState& request);
  // Asks the filler. Requests whose mask has an error get it as their failure; their mask allows nothing.
  void Fill();
  std::span<const uint32_t> Mask(int number) const noexcept;  // of -1: empty

 private:
  BitmaskFn fill_;
  size_t words_;
  std::vector<RequestState*> requests_;
  std::vector<MaskTask> tasks_;
  std::vector<uint32_t> masks_;  // [requests][words]
};

}  // namespace kvanta::engine
