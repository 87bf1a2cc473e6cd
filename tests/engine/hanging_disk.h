// A disk that hangs, and the outputs of an engine that runs on its own thread meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/engine_impl.h"
#include "engine/requests.h"
#include "store/fake_clock.h"

namespace kvanta::engine {

// Hangs until it is told otherwise. Shared with threads that an engine leaves behind.
struct HangingDisk {
  std::atomic<bool> hangs = true;
  std::atomic<double> pace = 0;  // seconds of the clock that a millisecond of hanging takes
  std::atomic<int> calls = 0;
  store::FakeClock clock;
};

// For EngineComponents::before_read and before_write.
inline std::function<void()> WaitWhileHanging(const std::shared_ptr<HangingDisk>& disk) {
  return [disk] {
    ++disk->calls;
    while (disk->hangs) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      disk->clock.Advance(disk->pace);
    }
  };
}

// Components of an engine whose writes hang, and whose time passes only where the test or the disk says so.
inline EngineComponents ComponentsWritingTo(const std::shared_ptr<HangingDisk>& disk, const EngineConfig& config) {
  EngineComponents components = LoadComponents(config);
  components.before_write = WaitWhileHanging(disk);
  components.now = disk->clock;
  return components;
}

// The same, whose reads hang.
inline EngineComponents ComponentsOn(const std::shared_ptr<HangingDisk>& disk, const EngineConfig& config) {
  EngineComponents components = LoadComponents(config);
  components.before_read = WaitWhileHanging(disk);
  components.now = disk->clock;
  return components;
}

// An engine that gives nothing up on a busy machine: its clock stands still, and servers have a minute to answer.
class EngineOnFakeClock : public Engine::Impl {
 public:
  explicit EngineOnFakeClock(const EngineConfig& config, const store::FakeClock& clock = {})
      : Impl(Components(config, clock)) {}

 private:
  static EngineComponents Components(const EngineConfig& config, const store::FakeClock& clock) {
    EngineComponents components = LoadComponents(config);
    components.now = clock;
    components.answer_seconds = 60;
    return components;
  }
};

class RunningOutputs {
 public:
  // For Engine::Start().
  StepCallback Callback() {
    return [this](std::span<const RequestOutput> outputs) {
      const std::lock_guard lock(mutex_);
      Collect(outputs, results_);
    };
  }
  std::map<std::string, Collected> Get() const {
    const std::lock_guard lock(mutex_);
    return results_;
  }
  bool HasEnded(const std::string& id) const {
    const std::lock_guard lock(mutex_);
    const auto found = results_.find(id);
    return found != results_.end() && found->second.finish != FinishReason::kNone;
  }
  Collected WaitFor(const std::string& id) const {
    while (!HasEnded(id)) std::this_thread::yield();
    return Get()[id];
  }
  // Waits until a request that needs no disk has been served: the steps until then have looked at those that load.
  void WaitForSteps(Engine::Impl& engine) const {
    Request request{.id = "steps", .prompt = {1, 2, 3}, .sampling = Greedy(3)};
    engine.Add(std::move(request));
    WaitFor("steps");
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Collected> results_;
};

}  // namespace kvanta::engine
