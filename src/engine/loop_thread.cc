#include "engine/loop_thread.h"

#include <fmt/format.h>

#include <system_error>
#include <utility>

#include "kvanta/error.h"

namespace kvanta::engine {

void LoopThread::Start(std::function<void(const std::stop_token&)> loop) {
  try {
    thread_ = std::jthread(std::move(loop));
  } catch (const std::system_error& error) {
    throw ResourceError(fmt::format("the engine's own thread cannot start: {}", error.what()));
  }
  id_ = thread_.get_id();
  started_ = true;
  ++starts_;
}

bool LoopThread::WaitForEnd(std::unique_lock<std::mutex>& lock) {
  if (!started_ || id_ == std::this_thread::get_id()) return false;
  const uint64_t start = starts_;
  lock.unlock();
  const std::lock_guard joining(join_mutex_);
  lock.lock();
  if (!started_ || starts_ != start) return false;  // another call has joined it
  lock.unlock();
  thread_.join();
  lock.lock();
  started_ = false;
  return true;
}

}  // namespace kvanta::engine
