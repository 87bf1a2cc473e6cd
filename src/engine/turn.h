// The right to touch scheduler, cache and model. Taken for a step; given back with the notes of the meantime done.
#pragma once

#include "engine/core.h"

namespace kvanta::engine {

class Core::Turn {
 public:
  explicit Turn(Core& core) : core_(core) {
    std::unique_lock lock(core_.mutex_);
    core_.turn_free_.wait(lock, [&] { return !core_.busy_; });
    core_.busy_ = true;
  }
  ~Turn() {
    const std::lock_guard lock(core_.mutex_);
    for (const Noted& abort : core_.aborts_) core_.AbortNow(abort);
    core_.aborts_.clear();
    core_.RefreshStats();
    core_.busy_ = false;
    core_.turn_free_.notify_one();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Core& core_;
};

}  // namespace kvanta::engine
