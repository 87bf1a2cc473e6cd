// A lock that is granted in the order of requests, so that a holder that retakes it at once cannot starve the waiters.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace kvanta::engine {

// Guarded by a mutex of the caller, who holds it in every call; Lock() releases it while it waits.
class TicketLock {
 public:
  void Lock(std::unique_lock<std::mutex>& lock) {
    const uint64_t ticket = next_ticket_++;
    released_.wait(lock, [&] { return now_serving_ == ticket; });
  }
  void Unlock() noexcept {
    ++now_serving_;
    if (Held()) released_.notify_all();
  }
  // By a thread that may still have to wake up.
  bool Held() const noexcept { return now_serving_ != next_ticket_; }
  int64_t Waiting() const noexcept { return Held() ? static_cast<int64_t>(next_ticket_ - now_serving_) - 1 : 0; }

 private:
  uint64_t next_ticket_ = 0;
  uint64_t now_serving_ = 0;
  std::condition_variable released_;
};

}  // namespace kvanta::engine
