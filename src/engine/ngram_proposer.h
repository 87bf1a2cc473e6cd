// N-gram speculation (prompt lookup): where the last tokens of a sequence occur earlier in it, the tokens that followed
// there are proposed. The longest match wins, and of equal ones the latest. A longer match proposes more tokens: after
// a match of two tokens the first one is right in a quarter of the cases, after one of eight nearly all are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/draft_proposer.h"

namespace kvanta::engine {

// Positions of every n-gram of a growing sequence, as the hash chains of LZ77: O(1) for a new token and 8 to 12 bytes
// each.
class NgramIndex : public DraftProposer::State {
 public:
  // Matches have min to max tokens; both at least 1.
  NgramIndex(int min, int max) : min_(min), max_(max) {}

  struct Match {
    int64_t end = -1;    // position after its last token; -1: no match
    int64_t length = 0;  // tokens that are equal, beyond max as well, as far as they decide on the draft's length
  };
  // The best earlier match of the end of `tokens`, which begins with those of earlier calls.
  Match Find(std::span<const int32_t> tokens);

 private:
  size_t BucketBefore(std::span<const int32_t> tokens, int64_t end) const noexcept;
  void Insert(std::span<const int32_t> tokens, int64_t end) noexcept;

  int min_, max_;
  std::vector<int32_t> heads_;     // [power of two]: latest end of an n-gram of min_ tokens with this hash; -1: none
  std::vector<int32_t> previous_;  // [end]: the next earlier one
};

class NgramProposer : public DraftProposer {
 public:
  NgramProposer(int min, int max) : min_(min), max_(max) {}
  std::unique_ptr<State> MakeState(const std::string& /*salt*/) override {
    return std::make_unique<NgramIndex>(min_, max_);
  }
  void Propose(std::span<Item> items) override;

 private:
  int min_, max_;
};

}  // namespace kvanta::engine
