// The clock of all times that Kvanta reports.
#pragma once

#include <chrono>
#include <functional>

namespace kvanta {

// Seconds of std::chrono::steady_clock (on Linux also Python's time.monotonic()).
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Now(), or what a test gives instead: for waits and limits that a test neither sits through nor leaves to the speed of
// its machine. Called by several threads.
using Clock = std::function<double()>;

}  // namespace kvanta
