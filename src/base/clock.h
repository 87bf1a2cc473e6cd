// The clock of all times that Kvanta reports.
#pragma once

#include <chrono>

namespace kvanta {

// Seconds of std::chrono::steady_clock (on Linux also Python's time.monotonic()).
inline double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace kvanta
