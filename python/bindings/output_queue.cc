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

constexpr size_t kMaxWaiting = 1024;

}  // namespace

OutputQueue::OutputQueue() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (descriptor_ < 0) throw ResourceError("no eventfd: " + std::generic_category().message(errno));
}

OutputQueue::~OutputQueue() {
  close(descriptor_);
}

void OutputQueue::Put(std::span<const RequestOutput> outputs) {
  std::unique_lock lock(mutex_);
  taken_.wait(lock, [&] { return news_.size() < kMaxWaiting || closed_; });
  const bool first = news_.empty();
  news_.insert(news_.end(), outputs.begin(), outputs.end());
  lock.unlock();  // who wakes up may run at once, in place of this thread, and must not find the lock held
  if (first) Signal();
}

std::vector<RequestOutput> OutputQueue::Take(size_t limit) {
  const std::lock_guard lock(mutex_);
  uint64_t signals = 0;
  [[maybe_unused]] const ssize_t got = read(descriptor_, &signals, sizeof(signals));
  const auto end = news_.begin() + static_cast<std::ptrdiff_t>(std::min(limit, news_.size()));
  std::vector<RequestOutput> oldest(std::make_move_iterator(news_.begin()), std::make_move_iterator(end));
  news_.erase(news_.begin(), end);
  if (!news_.empty()) Signal();
  taken_.notify_one();
  return oldest;
}

void OutputQueue::Close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  taken_.notify_one();
}

void OutputQueue::Signal() const noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t put = write(descriptor_, &one, sizeof(one));
}

}  // namespace kvanta::python
