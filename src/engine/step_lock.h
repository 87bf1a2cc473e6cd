// The right to touch scheduler, cache and model. Taken for a step; given back with the notes of the meantime done.
#pragma once

#include "engine/engine_impl.h"

namespace kvanta::engine {

class Core::StepLock {
 public:
  explicit StepLock(Core& core) : core_(core) {
    std::unique_lock lock(core_.mutex_);
    core_.step_lock_released_.wait(lock, [&] { return !core_.busy_; });
    core_.busy_ = true;
  }
  ~StepLock() {
    const std::lock_guard lock(core_.mutex_);
    for (const PendingAbort& abort : core_.aborts_) core_.AbortNow(abort);
    core_.aborts_.clear();
    core_.RefreshStats();
    core_.busy_ = false;
    core_.step_lock_released_.notify_one();
  }
  StepLock(const StepLock&) = delete;
  StepLock& operator=(const StepLock&) = delete;

 private:
  Core& core_;
};

}  // namespace kvanta::engine
