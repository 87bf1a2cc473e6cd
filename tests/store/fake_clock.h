// A clock that stands still until a test moves it. Copies share their time, also with threads that an engine leaves
// behind.
#pragma once

#include <atomic>
#include <memory>

namespace kvanta::store {

class FakeClock {
 public:
  double operator()() const { return *time_; }
  void Advance(double seconds) const { *time_ += seconds; }

 private:
  // Not 0, at which times of "never" would be those of a moment ago.
  std::shared_ptr<std::atomic<double>> time_ = std::make_shared<std::atomic<double>>(1000);
};

}  // namespace kvanta::store
