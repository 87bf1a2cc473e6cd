// The thread of a loop that any thread may stop, the loop itself included.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

namespace kvanta::engine {

// Guarded by a mutex of the caller, who holds it in every call; WaitForEnd() releases it while it waits.
class LoopThread {
 public:
  // Throws ResourceError if the system has no thread left. Needs !IsStarted().
  void Start(std::function<void(const std::stop_token&)> loop);
  // True until WaitForEnd() has waited for the loop's end.
  bool IsStarted() const noexcept { return started_; }
  void RequestStop() noexcept { thread_.request_stop(); }
  // Waits for the end of the loop that runs; true if it was this call that ended the thread, and no other's before.
  // False at once on the thread itself: its loop ends after the call.
  bool WaitForEnd(std::unique_lock<std::mutex>& lock);

 private:
  std::jthread thread_;
  std::thread::id id_;  // as thread_'s, which WaitForEnd() changes without the caller's mutex
  bool started_ = false;
  uint64_t starts_ = 0;  // tells a loop from a later one, whose thread may have the same id
  std::mutex join_mutex_;
};

}  // namespace kvanta::engine
