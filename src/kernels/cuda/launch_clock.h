// Time of the launch that a thread is in, for other threads.
#pragma once

#include <atomic>
#include <chrono>

namespace kvanta::kernels {

class LaunchClock {
 public:
  // A launch, during its lifetime.
  class Launching {
   public:
    explicit Launching(LaunchClock& clock) noexcept : clock_(clock) { clock_.since_ = Now(); }
    ~Launching() { clock_.since_ = 0; }
    Launching(const Launching&) = delete;
    Launching& operator=(const Launching&) = delete;

   private:
    LaunchClock& clock_;
  };

  // 0: no launch is in progress.
  std::chrono::duration<double> Time() const noexcept {
    const Ticks since = since_;
    return std::chrono::steady_clock::duration(since == 0 ? 0 : Now() - since);
  }

 private:
  using Ticks = std::chrono::steady_clock::rep;
  static Ticks Now() noexcept { return std::chrono::steady_clock::now().time_since_epoch().count(); }

  std::atomic<Ticks> since_{0};
};

}  // namespace kvanta::kernels
