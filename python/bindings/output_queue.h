// Queue of step outputs between the engine's thread and an event loop. The engine's thread never waits for the
// interpreter; the loop watches a file descriptor, as it does for its connections.
#pragma once

#include <kvanta/engine.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

namespace kvanta::python {

class OutputQueue {
 public:
  // Throws ResourceError.
  OutputQueue();
  ~OutputQueue();
  OutputQueue(const OutputQueue&) = delete;
  OutputQueue& operator=(const OutputQueue&) = delete;

  // Readable while the queue is not empty.
  int Descriptor() const noexcept { return descriptor_; }
  // Waits while the queue is full, unless closed: an engine must not run ahead of its readers.
  void Push(std::span<const RequestOutput> outputs);
  // The oldest outputs, at most `limit`.
  std::vector<RequestOutput> Pop(size_t limit);
  // Push no longer waits.
  void Close();

 private:
  void Signal() const noexcept;

  int descriptor_;
  std::mutex mutex_;
  std::condition_variable popped_;
  std::deque<RequestOutput> outputs_;
  bool closed_ = false;
};

}  // namespace kvanta::python
