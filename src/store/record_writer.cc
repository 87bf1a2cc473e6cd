#include "store/record_writer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace kvanta::store {
namespace {

constexpr int64_t kMaxQueuedBytes = int64_t{256} << 20;
constexpr size_t kMaxJobs = 65536;  // beyond it, times of use are not recorded
constexpr size_t kMaxBatchJobs = 256;
constexpr double kMinPause = 1, kMaxPause = 60;  // seconds without writes after a failure
constexpr double kHangSeconds = 10;              // if one batch takes longer, the place hangs

}  // namespace

RecordWriter::RecordWriter(RecordBackend& backend, const PageKey& identity, std::function<void()> before_write,
                           Clock now, std::function<void()> on_idle)
    : backend_(backend),
      identity_(identity),
      before_write_(std::move(before_write)),
      on_idle_(std::move(on_idle)),
      now_(std::move(now)) {}

void RecordWriter::Start(std::shared_ptr<void> owner) {
  thread_.Start(
      [this, owner = std::move(owner)](const std::stop_token& stop, IoThread::Lock& lock) { Loop(stop, lock); });
}

void RecordWriter::RequestStop(double deadline) {
  {
    const std::lock_guard lock(mutex_);
    close_by_ = deadline;
  }
  thread_.RequestStop();
}

void RecordWriter::End() noexcept {
  thread_.End(close_by_);
}

bool RecordWriter::Hangs() const {
  return thread_.Hangs(kHangSeconds);
}

bool RecordWriter::ShouldWrite(const RecordId& id, int64_t bytes) {
  const std::string name = FileName(id);
  const bool known = backend_.IsKnown(id);
  const std::lock_guard lock(mutex_);
  // A count of what is there may find again what is to be removed.
  if ((known && !removals_.contains(name)) || queued_.contains(name)) return false;
  if (Hangs()) {
    error_latch_.Report(backend_.Name(), "pages cannot be written in time", "it is slow or does not answer");
  } else if (queued_bytes_ + bytes <= kMaxQueuedBytes && now_() >= again_at_) {
    return true;
  }
  ++dropped_;
  return false;
}

// Writes are bounded by their bytes. While the place hangs, the number of the others is what needs a bound.
bool RecordWriter::Queue(Job job) {
  if (job.kind != Kind::kWrite && jobs_.size() >= kMaxJobs) return false;
  jobs_.push_back(std::move(job));
  ++queued_jobs_;
  work_.notify_one();
  return true;
}

void RecordWriter::Write(const RecordUse& use, std::shared_ptr<const RecordContent> content) {
  const std::lock_guard lock(mutex_);
  const auto [name, fresh] = queued_.insert(FileName(use.id));
  if (!fresh) return;
  const auto bytes = std::ssize(content->Payload());
  try {
    Queue({.kind = Kind::kWrite, .use = use, .content = std::move(content)});
  } catch (...) {
    queued_.erase(name);
    throw;
  }
  queued_bytes_ += bytes;
}

void RecordWriter::Touch(const RecordUse& use) {
  if (!backend_.NeedsTouch(use.id)) return;
  const std::lock_guard lock(mutex_);
  Queue({.kind = Kind::kTouch, .use = use, .content = nullptr});
}

void RecordWriter::Pin(const RecordUse& use, int64_t until_ns) {
  const std::lock_guard lock(mutex_);
  Queue({.kind = Kind::kPin, .use = use, .content = nullptr, .until_ns = until_ns});
}

void RecordWriter::Drop(const RecordId& id) {
  backend_.Invalidate(id);
  const std::lock_guard lock(mutex_);
  const auto name = removals_.insert(FileName(id));
  try {
    if (!Queue({.kind = Kind::kRemove, .use = {.id = id}, .content = nullptr})) removals_.erase(name);
  } catch (...) {
    removals_.erase(name);
    throw;
  }
}

void RecordWriter::Flush() {
  std::unique_lock lock(mutex_);
  while (!jobs_.empty() && !Hangs()) idle_.wait_for(lock, kPollInterval);
}

int64_t RecordWriter::Queued() const {
  const std::lock_guard lock(mutex_);
  return queued_jobs_;
}

bool RecordWriter::HasEnded(int64_t queued) const {
  const std::lock_guard lock(mutex_);
  return queued_jobs_ - std::ssize(jobs_) >= queued || Hangs();
}

size_t RecordWriter::NextBatch() const {
  if (backend_.BatchBytes() == 0) return 1;
  int64_t bytes = 0;
  size_t count = 0;
  while (count < std::min(jobs_.size(), kMaxBatchJobs) && jobs_[count].kind == jobs_[0].kind) {
    bytes += jobs_[count++].Bytes();
    if (bytes > backend_.BatchBytes()) break;
  }
  return count;
}

void RecordWriter::Loop(const std::stop_token& stop, IoThread::Lock& lock) {
  thread_.Call(lock, [this] {
    try {
      backend_.Open();
    } catch (const std::exception&) {  // no memory: records are not found, and are written again
    }
  });
  std::vector<const Job*> batch;
  batch.reserve(kMaxBatchJobs);
  for (;;) {
    work_.wait(lock, stop, [this] { return !jobs_.empty(); });
    if (jobs_.empty() || (stop.stop_requested() && now_() > close_by_)) return;
    const size_t count = NextBatch();
    batch.clear();
    for (size_t i = 0; i < count; ++i) batch.push_back(&jobs_[i]);  // stay in place: others only append
    const Kind kind = jobs_[0].kind;
    thread_.Call(lock, [&] { Perform(kind, batch); });
    for (const Job* job : batch) {
      queued_bytes_ -= job->Bytes();
      if (kind == Kind::kWrite) queued_.erase(FileName(job->use.id));
      if (kind == Kind::kRemove) removals_.erase(removals_.find(FileName(job->use.id)));
      jobs_.pop_front();
    }
    if (!jobs_.empty()) continue;
    idle_.notify_all();
    if (!on_idle_ || stop.stop_requested()) continue;
    lock.unlock();
    on_idle_();
    lock.lock();
  }
}

void RecordWriter::Perform(Kind kind, std::span<const Job* const> jobs) {
  try {
    switch (kind) {
      case Kind::kWrite:
        WriteRecords(jobs);
        break;
      case Kind::kTouch: {
        std::vector<RecordUse> uses;
        for (const Job* job : jobs) uses.push_back(job->use);
        backend_.Touch(uses);
        break;
      }
      case Kind::kPin: {
        std::vector<RecordUse> uses;
        std::vector<int64_t> until_ns;
        for (const Job* job : jobs) {
          uses.push_back(job->use);
          until_ns.push_back(job->until_ns);
        }
        backend_.Pin(uses, until_ns);
        break;
      }
      case Kind::kRemove: {
        std::vector<RecordId> ids;
        for (const Job* job : jobs) ids.push_back(job->use.id);
        backend_.Remove(ids);
        break;
      }
    }
  } catch (const std::exception&) {  // no memory: the records stay as they are
  }
}

void RecordWriter::WriteRecords(std::span<const Job* const> jobs) {
  {
    const std::lock_guard lock(mutex_);
    if (now_() < again_at_) {
      dropped_ += std::ssize(jobs);
      return;
    }
  }
  const double start = now_();
  if (before_write_) before_write_();
  WriteResult result;
  try {
    std::vector<std::vector<uint8_t>> headers;
    std::vector<RecordToWrite> records;
    headers.reserve(jobs.size());
    for (const Job* job : jobs) {
      const RecordContent& content = *job->content;
      headers.emplace_back();
      if (backend_.NeedsHeader()) {
        headers.back() = EncodePageHeader(identity_, job->use.id, content.tokens, content.Payload());
      }
      records.push_back({.use = job->use, .header = headers.back(), .content = job->content});
    }
    result = backend_.Write(records);
  } catch (const std::exception&) {
    result.error = std::strerror(ENOMEM);
  }
  const std::lock_guard lock(mutex_);
  seconds_ += now_() - start;
  written_bytes_ += result.bytes;
  if (result.error.empty()) {
    pause_ = 0;
    error_latch_.End();
    return;
  }
  ++errors_;
  pause_ = std::clamp(2 * pause_, kMinPause, kMaxPause);
  again_at_ = now_() + pause_;
  error_latch_.Report(backend_.Name(), "pages cannot be written", result.error);
}

void RecordWriter::Count(CacheTierStats& stats) const {
  const std::lock_guard lock(mutex_);
  stats.written_bytes = written_bytes_;
  stats.write_seconds = seconds_;
  stats.write_errors = errors_;
  stats.dropped_records += dropped_;
}

std::string RecordWriter::TakeWarning() {
  const std::lock_guard lock(mutex_);
  return error_latch_.Take();
}

}  // namespace kvanta::store
