#include "output_queue.h"

#include <kvanta/error.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <system_error>

namespace kvanta::python {
namespace {

constexpr size_t kMaxQueued = 1024;

}  // namespace

OutputQueue::OutputQueue() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor_ < 0) throw ResourceError("no eventfd: " + std::generic_category().message(errno));
}

OutputQueue::~OutputQueue() {
  close(descriptor_);
}

void OutputQueue::Push(std::span<const RequestOutput> outputs) {
  std::unique_lock lock(mutex_);
  popped_.wait(lock, [&] { return outputs_.size() < kMaxQueued || closed_; });
  const bool first = outputs_.empty();
  outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  lock.unlock();  // a woken reader may preempt this thread, and must not find the mutex locked
  if (first) Signal();
}

std::vector<RequestOutput> OutputQueue::Pop(size_t limit) {
  const std::lock_guard lock(mutex_);
  uint64_t signals = 0;
  [[maybe_unused]] const ssize_t got = read(descriptor_, &signals, sizeof(signals));
  const auto end = outputs_.begin() + static_cast<std::ptrdiff_t>(std::min(limit, outputs_.size()));
  std::vector<RequestOutput> oldest(std::make_move_iterator(outputs_.begin()), std::make_move_iterator(end));
  outputs_.erase(outputs_.begin(), end);
  if (!outputs_.empty()) Signal();
  popped_.notify_one();
  return oldest;
}

void OutputQueue::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  popped_.notify_one();
}

void OutputQueue::Signal() const noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = write(descriptor_, &one, sizeof(one));
}

}  // namespace kvanta::python
