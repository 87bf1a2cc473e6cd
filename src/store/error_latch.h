// Reports the first error of a failure in one line for the operator, and no further one until it ends. Guarded by its
// owner's mutex.
#pragma once

#include <string>
#include <utility>

namespace kvanta::store {

class ErrorLatch {
 public:
  // place: RecordBackend::Name().
  void Report(const std::string& place, const std::string& what, const std::string& why) {
    if (!std::exchange(reported_, true)) {
      text_ = place + ": " + what + ": " + why + "; the engine goes on without it and tries again";
    }
  }
  void End() { reported_ = false; }
  // Empty: nothing new.
  std::string Take() { return std::exchange(text_, {}); }

 private:
  bool reported_ = false;
  std::string text_;
};

}  // namespace kvanta::store
