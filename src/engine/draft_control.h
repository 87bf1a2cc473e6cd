// Decides whether a request speculates: verifying a draft token costs part of a step, so drafts that are mostly
// rejected slow a request down.
#pragma once

#include <algorithm>

namespace kvanta::engine {

class DraftControl {
 public:
  // True if the next draft of the request should be verified. Call once per step in which there is one.
  bool Speculates() noexcept {
    if (pause_ == 0) return true;
    --pause_;
    return false;
  }

  // Counts a verified draft. Below kMinAcceptance the request pauses; a first draft that fails after it doubles the
  // pause.
  void Record(int drafted, int accepted) noexcept {
    const float rate = static_cast<float>(accepted) / static_cast<float>(drafted);
    acceptance_ += kWeight * (rate - acceptance_);
    if (acceptance_ >= kMinAcceptance) {
      next_pause_ = std::max(kFirstPause, next_pause_ / 2);
      return;
    }
    pause_ = next_pause_;
    next_pause_ = std::min(2 * next_pause_, kLastPause);
    acceptance_ = kMinAcceptance;  // one trial after the pause
  }

 private:
  static constexpr float kWeight = 0.25F;
  static constexpr float kMinAcceptance = 0.2F;
  static constexpr int kFirstPause = 8;  // drafts
  static constexpr int kLastPause = 256;

  float acceptance_ = 0.5F;  // exponential average of accepted / drafted
  int pause_ = 0;
  int next_pause_ = kFirstPause;
};

}  // namespace kvanta::engine
