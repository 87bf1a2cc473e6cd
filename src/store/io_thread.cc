#include "store/io_thread.h"

#include <utility>

namespace kvanta::store {

void IoThread::Start(std::function<void(const std::stop_token& stop, Lock& lock)> loop) {
  thread_ = std::jthread([this, loop = std::move(loop)](const std::stop_token& stop) {
    Lock lock(mutex_);
    loop(stop, lock);
    ended_ = true;
    end_.notify_all();
  });
}

void IoThread::End(double deadline) noexcept {
  if (!thread_.joinable()) return;
  {
    Lock lock(mutex_);
    while (!ended_ && (now_() < deadline || since_ == 0)) end_.wait_for(lock, kPollInterval);
    if (!ended_) {
      lock.unlock();
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

}  // namespace kvanta::store
