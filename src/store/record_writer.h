// Writes records to one place on a thread of its own, after the steps that made them. The queue is bounded, and writes
// are off for a while after a failure: the records stay in memory alone, and are offered again when they are used.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "store/io_thread.h"
#include "store/record_backend.h"

namespace kvanta::store {

class RecordWriter {
 public:
  // before_write: for tests, called before each write on the writing thread. on_idle: called there when the queue has
  // become empty, but not after RequestStop().
  RecordWriter(RecordBackend& backend, const PageKey& identity, std::function<void()> before_write, Clock now = Now,
               std::function<void()> on_idle = {});
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // owner: owns this object and the backend; the thread shares it.
  void Start(std::shared_ptr<void> owner);
  // Writes what is queued until `deadline`, and ends.
  void RequestStop(double deadline);
  // After RequestStop(): waits for the end, or for the deadline if the place hangs.
  void End() noexcept;

  // True if a record of `bytes` should be written: it is not stored, and neither is the queue full nor does the place
  // fail or hang.
  bool ShouldWrite(const RecordId& id, int64_t bytes);
  void Write(const RecordUse& use, std::shared_ptr<const RecordContent> content);
  // Renews the time of last use of a stored record, unless that was a moment ago.
  void Touch(const RecordUse& use);
  // Keeps a record, written or queued, until then.
  void Pin(const RecordUse& use, int64_t until_ns);
  // Removes a record, written or queued.
  void Drop(const RecordId& id);
  // Waits until the queue is empty, or the place hangs.
  void Flush();
  // Jobs that have ever been queued; HasEnded: true once as many have ended, or while the place hangs.
  int64_t Queued() const;
  bool HasEnded(int64_t queued) const;

  // Fills in what is counted here.
  void Count(CacheTierStats& stats) const;
  std::string TakeWarning();

 private:
  enum class Kind : uint8_t { kWrite, kTouch, kPin, kRemove };
  struct Job {
    Kind kind = Kind::kWrite;
    RecordUse use;
    std::shared_ptr<const RecordContent> content;  // only for kWrite
    int64_t until_ns = 0;                          // only for kPin

    int64_t Bytes() const noexcept { return content ? std::ssize(content->Payload()) : 0; }
  };

  // With the mutex. False if there are too many.
  bool Queue(Job job);
  bool Hangs() const;
  size_t NextBatch() const;  // jobs of one kind

  void Loop(const std::stop_token& stop, IoThread::Lock& lock);
  void Perform(Kind kind, std::span<const Job* const> jobs);
  void WriteRecords(std::span<const Job* const> jobs);

  RecordBackend& backend_;
  const PageKey identity_;
  const std::function<void()> before_write_, on_idle_;
  const Clock now_;

  mutable std::mutex mutex_;
  std::condition_variable_any work_, idle_;
  std::deque<Job> jobs_;     // the first ones are in progress
  int64_t queued_jobs_ = 0;  // ever
  int64_t queued_bytes_ = 0;
  std::unordered_set<std::string> queued_;         // names of records to write
  std::unordered_multiset<std::string> removals_;  // names of records to remove
  double again_at_ = 0;                            // writes are off until then
  double pause_ = 0;
  double close_by_ = 0;  // end of writing what is queued, after RequestStop()
  int64_t written_bytes_ = 0, errors_ = 0, dropped_ = 0;
  double seconds_ = 0;
  ErrorLatch error_latch_;
  IoThread thread_{mutex_, now_};
};

}  // namespace kvanta::store
