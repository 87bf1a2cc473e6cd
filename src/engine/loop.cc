// The loop over steps: driven by the caller, or by the engine's own thread.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "engine/engine_impl.h"
#include "engine/error_text.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

constexpr size_t kRecentSteps = 4096;
constexpr std::chrono::milliseconds kLoadPoll(20);    // to give up loads and end requests in time
constexpr std::chrono::milliseconds kRetryDelay(10);  // when there was no memory to begin a step

}  // namespace

void Engine::Impl::CheckStopped(const char* what) const {
  const std::lock_guard lock(mutex_);
  if (loop_thread_.IsStarted())
    throw InputError(fmt::format("{} while the engine's own thread runs: Stop() it first", what));
}

void Engine::Impl::CheckAlone(const char* what) const {
  if (components_.ranks->IsSingleRank()) return;
  throw InputError(fmt::format("{} with {} ranks: use 1 (tensor_parallel_size, pipeline_parallel_size)", what,
                               components_.ranks->Size()));
}

void Engine::Impl::Start(StepCallback callback) {
  if (!callback) throw InputError("Start needs a callback");
  const std::lock_guard lock(mutex_);
  if (loop_thread_.IsStarted()) throw InputError("Start while the engine's own thread runs: Stop() it first");
  loop_thread_.Start([this, callback = std::move(callback)](const std::stop_token& stop) { Loop(stop, callback); });
}

void Engine::Impl::Stop(bool drain) {
  std::unique_lock lock(mutex_);
  if (!loop_thread_.IsStarted()) return;
  if (drain) {
    draining_ = true;
    work_available_.notify_all();
  } else {
    loop_thread_.RequestStop();  // may cut another call's drain short
  }
  if (loop_thread_.WaitForEnd(lock)) draining_ = false;
}

void Engine::Impl::Loop(const std::stop_token& stop, const StepCallback& callback) {
  std::vector<RequestOutput> outputs;
  while (!stop.stop_requested()) {
    try {
      if (LoopStep(callback, outputs)) continue;
      std::unique_lock lock(mutex_);
      const auto has_work = [&] { return HasUpdates() || (draining_ && !queue_.HasUnfinished() && held_.empty()); };
      if (IsLoading() || !held_.empty()) {
        work_available_.wait_for(lock, stop, kLoadPoll, has_work);
      } else {
        work_available_.wait(lock, stop, has_work);
      }
      if (draining_ && !queue_.HasUnfinished() && !queue_.HasOutputs() && held_.empty()) return;
    } catch (const std::exception& error) {  // no memory for a step that has not begun, or for a warning
      Warn(engine::ErrorText(error));
      std::unique_lock lock(mutex_);
      work_available_.wait_for(lock, stop, kRetryDelay, [] { return false; });
    }
  }
}

// One step and its callback; false when there was nothing to do.
bool Engine::Impl::LoopStep(const StepCallback& callback, std::vector<RequestOutput>& outputs) {
  bool worked = false;
  const double begin = Now();
  double forward = 0;
  {
    const StepLock step_lock(*this);
    serves_ = true;
    forward -= counters_.seconds_forward;
    worked = StepLocked(outputs);
    forward += counters_.seconds_forward;
    HoldPrompts(outputs);
  }
  if (!outputs.empty()) {
    const double start = Now();
    try {
      callback(outputs);
    } catch (const std::exception& error) {
      Warn(engine::ErrorText("the step callback threw: {}", error.what()));
    } catch (...) {
      Warn("the step callback threw something that is no std::exception");
    }
    seconds_callback_ = seconds_callback_ + (Now() - start);
  }
  const auto served = std::ranges::count_if(outputs, [](const auto& output) { return !output.tokens.empty(); });
  if (served > 0) RecordStepTiming({static_cast<int>(served), static_cast<float>(Now() - begin - forward)});
  return worked || (quality_ && WorkOnQuality());
}

void Engine::Impl::RecordStepTiming(StepTiming timing) {
  const std::lock_guard lock(mutex_);
  if (recent_steps_.size() == kRecentSteps) recent_steps_.pop_front();
  recent_steps_.push_back(timing);
}

std::vector<StepTiming> Engine::Impl::RecentSteps() const {
  const std::lock_guard lock(mutex_);
  return {recent_steps_.begin(), recent_steps_.end()};
}

// False when nothing is left, or while the engine drains: Stop() waits for requests only.
bool Engine::Impl::WorkOnQuality() {
  {
    const std::lock_guard lock(mutex_);
    if (draining_) return false;
  }
  const StepLock step_lock(*this);
  if (!quality_->HasWork()) return false;
  quality_->Work();
  return true;
}

bool Engine::Impl::MeasureQuality() {
  CheckStopped("MeasureQuality");
  return quality_ && WorkOnQuality();
}

bool Engine::Impl::Step(std::vector<RequestOutput>& outputs) {
  CheckStopped("Step");
  for (;;) {
    {
      const StepLock step_lock(*this);
      serves_ = false;
      const bool worked = StepLocked(outputs);
      HoldPrompts(outputs);
      if (worked || !outputs.empty()) return true;
      if (!IsLoading() && held_.empty()) return false;
    }
    std::unique_lock lock(mutex_);
    work_available_.wait_for(lock, kLoadPoll, [&] { return HasUpdates(); });
  }
}

// With the role prefill: holds back outputs of prompts whose pages are being written, and adds those whose pages have
// been. Without memory to hold them they are given out now: whoever loads the pages computes what is missing.
void Engine::Impl::HoldPrompts(std::vector<RequestOutput>& outputs) noexcept {
  if (components_.config.role != "prefill" || !tiers_) return;
  const auto prompts =
      std::partition(outputs.begin(), outputs.end(), [](const auto& output) { return output.tokens.empty(); });
  try {
    if (prompts != outputs.end()) {
      std::vector<RequestOutput> held(static_cast<size_t>(outputs.end() - prompts));
      held_.push_back({.writes = tiers_->QueuedWrites(), .outputs = std::move(held)});
      std::move(prompts, outputs.end(), held_.back().outputs.begin());
      outputs.erase(prompts, outputs.end());
    }
    while (!held_.empty() && tiers_->AreWritten(held_.front().writes)) {
      std::vector<RequestOutput>& written = held_.front().outputs;
      outputs.reserve(outputs.size() + written.size());
      std::move(written.begin(), written.end(), std::back_inserter(outputs));
      held_.pop_front();
    }
  } catch (const std::exception&) {
  }
}

}  // namespace kvanta
