// Decides whether a request speculates: a row costs part of a step, so drafts that are mostly rejected slow all down.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvanta::engine {

inline constexpr float kRowCost = 0.1F;     // with a margin: .05 to .08 on SmolLM2 (135 M, AVX-512, 2 threads)
inline constexpr double kCostWeight = 0.1;  // weight of a step in the moving means of times (base/moving_mean.h)

// Time of a pass over so many rows, in passes over one row.
inline float PassCost(int64_t rows) noexcept {
  return 1.0F + kRowCost * static_cast<float>(rows - 1);
}

// Share of draft tokens that must be accepted to pay, in a step of `rows` rows for `sequences` decoding sequences: a
// row more costs kRowCost, and gains 1 / sequences of the step if its token is accepted. draft_cost: time of a draft
// model's pass over one sequence, in passes of the target over one row; one pass gives every sequence a draft token.
inline float MinAcceptance(int64_t sequences, int64_t rows, float draft_cost = 0.0F) noexcept {
  return (kRowCost * static_cast<float>(sequences) + draft_cost * PassCost(sequences)) / PassCost(rows);
}

class DraftControl {
 public:
  // True if the next draft of the request should be verified. Call once per step in which there is one.
  bool Speculates() noexcept {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }

  // Draft tokens, at most `limit`, up to which the next one is still accepted often enough.
  int Length(int limit, float min_acceptance) const noexcept {
    int length = std::min(1, limit);
    for (float share = continuation_ * continuation_; length < limit && share >= min_acceptance; ++length) {
      share *= continuation_;
    }
    return length;
  }

  // Counts a verified draft. Below `min_acceptance` the request pauses, and twice as long when its first draft after a
  // pause fails.
  void Record(int drafted, int accepted, float min_acceptance) noexcept {
    const float rate = static_cast<float>(accepted) / static_cast<float>(drafted);
    acceptance_ += kWeight * (rate - acceptance_);
    const int trials = std::min(accepted + 1, drafted);
    continuation_ += kWeight * (static_cast<float>(accepted) / static_cast<float>(trials) - continuation_);
    if (acceptance_ >= min_acceptance) {
      next_pause_ = std::max(kFirstPause, next_pause_ / 2);
      return;
    }
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kLastPause);
    acceptance_ = min_acceptance;  // one trial after the pause
    continuation_ = std::min(min_acceptance, 1.0F);
  }

 private:
  static constexpr float kWeight = 1.0F / 8;
  static constexpr int kFirstPause = 8;  // drafts
  static constexpr int kLastPause = 256;

  float acceptance_ = 1;    // exponential average of accepted / drafted
  float continuation_ = 1;  // average of the share of accepted tokens among those after accepted ones
  int pause_ = 0;
  int next_pause_ = kFirstPause;
};

}  // namespace kvanta::engine
