// Decides whether a request speculates: a row costs part of a step, so drafts that are mostly rejected slow all down.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvanta::engine {

// Share of draft tokens that must be accepted to pay, in a step of `rows` rows for `sequences` decoding sequences. A
// step takes about 1 + c (rows - 1), so a row more costs c of that, and gains 1 / sequences if its token is accepted.
inline float MinAcceptance(int64_t sequences, int64_t rows) noexcept {
  constexpr float kRowCost = 0.1F;  // c; with a margin: .05 to .08 on SmolLM2 (135 M, AVX-512, 2 threads)
  return kRowCost * static_cast<float>(sequences) / (1.0F + kRowCost * static_cast<float>(rows - 1));
}

class DraftControl {
 public:
  // True if the next draft of the request should be verified. Call once per step in which there is one.
  bool Speculates() noexcept {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }

  // Counts a verified draft. Below `min_acceptance` the request pauses, and twice as long when its first draft after a
  // pause fails.
  void Record(int drafted, int accepted, float min_acceptance) noexcept {
    const float rate = static_cast<float>(accepted) / static_cast<float>(drafted);
    acceptance_ += kWeight * (rate - acceptance_);
    if (acceptance_ >= min_acceptance) {
      next_pause_ = std::max(kFirstPause, next_pause_ / 2);
      return;
    }
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kLastPause);
    acceptance_ = min_acceptance;  // one trial after the pause
  }

 private:
  static constexpr float kWeight = 1.0F / 3;
  static constexpr int kFirstPause = 8;  // drafts
  static constexpr int kLastPause = 256;

  float acceptance_ = 1;  // exponential average of accepted / drafted
  int pause_ = 0;
  int next_pause_ = kFirstPause;
};

}  // namespace kvanta::engine
