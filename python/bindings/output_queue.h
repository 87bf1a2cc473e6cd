// News of the engine's steps on their way to an event loop. The engine's thread leaves them here and never waits for
// the interpreter; the loop watches a file descriptor, as it does for its connections.
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

  // Readable while there are news.
  int Descriptor() const noexcept { return descriptor_; }
  // Waits while nobody takes what is there already, unless closed: an engine must not run ahead of its readers.
  void Put(std::span<const RequestOutput> outputs);
  // The oldest ones, at most `most`.
  std::vector<RequestOutput> Take(size_t limit);
  // Nobody takes any more.
  void Close();

 private:
  void Signal() const noexcept;

  int descriptor_;
  std::mutex mutex_;
  std::condition_variable taken_;
  std::deque<RequestOutput> news_;
  bool closed_ = false;
};

}  // namespace kvanta::python
