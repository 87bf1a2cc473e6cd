// A thread whose calls may hang in the system, as on a network file system whose server is gone. It is then left
// behind, so that its function must share the ownership of all that it uses.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace kvanta::store {

inline constexpr std::chrono::milliseconds kPollInterval(10);  // interval of waiting for what may hang

class IoThread {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // mutex: its owner's, which guards the state of this object.
  IoThread(std::mutex& mutex, Clock now) : mutex_(mutex), now_(std::move(now)) {}

  // `loop` runs with the mutex.
  void Start(std::function<void(const std::stop_token& stop, Lock& lock)> loop);

  // On the thread, with the mutex: performs `work`, which may hang, without it.
  template <class Work>
  void Call(Lock& lock, Work work) {
    since_ = moved_ = now_();
    lock.unlock();
    work();
    lock.lock();
    since_ = 0;
    moved_ = now_();
  }
  // With the mutex. True if a call has taken longer.
  bool Hangs(double seconds) const { return since_ != 0 && now_() - since_ > seconds; }
  // With the mutex. Time at which a call last began or ended.
  double LastMove() const { return moved_; }

  // ---- end; the owner's loop ends when it is told to stop

  void RequestStop() { thread_.request_stop(); }
  // Waits for the loop's end; after `deadline`, no longer for a call. Nothing without a loop.
  void End(double deadline) noexcept;

 private:
  std::mutex& mutex_;
  const Clock now_;
  double since_ = 0;  // begin of the call in progress; 0: none
  double moved_ = 0;
  bool ended_ = false;
  std::condition_variable end_;
  std::jthread thread_;
};

}  // namespace kvanta::store
