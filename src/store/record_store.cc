#include "store/record_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/quote.h"
#include "store/load.h"

namespace kvanta::store {
namespace {

constexpr int64_t kMaxQueuedBytes = int64_t{256} << 20;
constexpr size_t kMaxJobs = 65536;                         // beyond it, times of use are not recorded
constexpr double kMinWritePause = 1, kMaxWritePause = 60;  // seconds without writes after a failure
constexpr double kHangSeconds = 10;                        // of one file's write: the disk hangs
constexpr double kCloseSeconds = 10;                       // of writing what is queued at the end
constexpr double kReadEndSeconds = 1;                      // of waiting for a read at the end
constexpr std::chrono::milliseconds kPollInterval(10);     // of waiting for what may hang

size_t MaxFileBytes(const RecordStoreConfig& config, const cache::KvCacheSpec& spec) {
  int64_t longest = 0;
  for (const auto& kinds : config.record_bytes) longest = std::max({longest, kinds[0], kinds[1]});
  return kRecordHeaderBytes + static_cast<size_t>(longest) + sizeof(int32_t) * static_cast<size_t>(spec.page_size);
}

}  // namespace

RecordStore::RecordStore(RecordStoreConfig config, const cache::KvCacheSpec& spec)
    : config_(std::move(config)),
      spec_(spec),
      folder_({.folder = config_.folder,
               .limit_bytes = config_.limit_bytes,
               .identity = config_.identity,
               .max_file_bytes = MaxFileBytes(config_, spec)}) {
  stats_.limit_bytes = config_.limit_bytes;
}

std::shared_ptr<RecordStore> RecordStore::Open(RecordStoreConfig config, const cache::KvCacheSpec& spec) {
  std::shared_ptr<RecordStore> store(new RecordStore(std::move(config), spec));
  store->loader_ = std::jthread([store](const std::stop_token& stop) { store->LoadLoop(stop); });
  try {
    store->writer_ = std::jthread([store](const std::stop_token& stop) { store->WriteLoop(stop); });
  } catch (...) {
    store->loader_ = {};
    throw;
  }
  return store;
}

RecordStore::~RecordStore() = default;

void RecordStore::End(std::jthread& thread, const bool& ended, const double& in_system_since,
                      double deadline) noexcept {
  {
    std::unique_lock lock(mutex_);
    while (!ended && (Now() < deadline || in_system_since == 0)) thread_ended_.wait_for(lock, kPollInterval);
    if (!ended) {
      lock.unlock();
      thread.detach();
      return;
    }
  }
  thread.join();
}

void RecordStore::Close() noexcept {
  const double now = Now();
  {
    const std::lock_guard lock(mutex_);
    close_by_ = now + kCloseSeconds;
  }
  loader_.request_stop();
  writer_.request_stop();
  End(loader_, loader_ended_, read_since_, now + kReadEndSeconds);
  End(writer_, writer_ended_, write_since_, now + kCloseSeconds);
}

// One line for the operator, until the trouble is over.
void RecordStore::Warn(bool& warned, const char* what, const std::string& why) {
  if (std::exchange(warned, true)) return;
  warning_ = fmt::format("kv_cache_dir = {}: {}: {}; the engine goes on without it and tries again",
                         Quote(folder_.Path()), what, why);
}

std::string RecordStore::TakeWarning() {
  const std::lock_guard lock(mutex_);
  return std::exchange(warning_, {});
}

CacheFolderStats RecordStore::Stats() const {
  const FolderUsage usage = folder_.Usage();
  const std::lock_guard lock(mutex_);
  CacheFolderStats stats = stats_;
  stats.files = usage.files;
  stats.bytes = usage.bytes;
  stats.own_bytes = usage.own_bytes;
  stats.evictions = usage.evictions;
  return stats;
}

bool RecordStore::Wants(const RecordId& id) {
  if (folder_.Knows(id)) return false;
  const int64_t bytes = RecordBytes(id.group, id.kind);
  const std::lock_guard lock(mutex_);
  if (queued_.contains(FileName(id))) return false;
  if (WriterHangs()) {
    Warn(write_trouble_, "pages cannot be written in time", "the disk is slow or does not answer");
  } else if (queued_bytes_ + bytes <= kMaxQueuedBytes && Now() >= write_again_at_) {
    return true;
  }
  ++stats_.dropped_records;
  return false;
}

void RecordStore::Write(const RecordId& id, int64_t index, std::span<const int32_t> tokens,
                        std::vector<uint8_t> payload) {
  const auto bytes = std::ssize(payload);
  Job job{.kind = Job::Kind::kWrite,
          .id = id,
          .index = index,
          .tokens = {tokens.begin(), tokens.end()},
          .payload = std::move(payload)};
  const std::lock_guard lock(mutex_);
  const auto [name, fresh] = queued_.insert(FileName(id));
  if (!fresh) return;
  try {
    jobs_.push_back(std::move(job));
  } catch (...) {
    queued_.erase(name);
    throw;
  }
  queued_bytes_ += bytes;
  write_work_.notify_one();
}

void RecordStore::Touch(const RecordId& id, int64_t index) {
  if (!folder_.IsStale(id)) return;
  const std::lock_guard lock(mutex_);
  Queue({.kind = Job::Kind::kTouch, .id = id, .index = index, .tokens = {}, .payload = {}});
}

void RecordStore::Pin(const RecordId& id, int64_t index, double seconds) {
  const int64_t until_ns = WallClockNs() + static_cast<int64_t>(seconds * 1e9);
  const std::lock_guard lock(mutex_);
  Queue({.kind = Job::Kind::kPin, .id = id, .index = index, .tokens = {}, .payload = {}, .until_ns = until_ns});
}

void RecordStore::Drop(const RecordId& id) {
  const std::lock_guard lock(mutex_);
  Queue({.kind = Job::Kind::kRemove, .id = id, .index = 0, .tokens = {}, .payload = {}});
}

// Jobs without a payload: while the disk hangs, their number is what needs a bound.
void RecordStore::Queue(Job job) {
  if (jobs_.size() >= kMaxJobs) return;
  jobs_.push_back(std::move(job));
  write_work_.notify_one();
}

bool RecordStore::WriterHangs() const {
  return write_since_ != 0 && Now() - write_since_ > kHangSeconds;
}

void RecordStore::Flush() {
  std::unique_lock lock(mutex_);
  while (!jobs_.empty() && !WriterHangs()) write_idle_.wait_for(lock, kPollInterval);
}

void RecordStore::WriteLoop(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const auto in_system = [&](auto work) {
    write_since_ = Now();
    lock.unlock();
    work();
    lock.lock();
    write_since_ = 0;
  };
  in_system([this] { folder_.Scan(); });  // before the first write, which may have to evict
  for (;;) {
    write_work_.wait(lock, stop, [this] { return !jobs_.empty(); });
    if (jobs_.empty() || (stop.stop_requested() && Now() > close_by_)) break;
    Job& job = jobs_.front();  // others only append
    in_system([&] { Perform(job); });
    if (job.kind == Job::Kind::kWrite) {
      queued_bytes_ -= std::ssize(job.payload);
      queued_.erase(FileName(job.id));
    }
    jobs_.pop_front();
    if (jobs_.empty()) write_idle_.notify_all();
  }
  writer_ended_ = true;
  thread_ended_.notify_all();
}

void RecordStore::Perform(const Job& job) {
  switch (job.kind) {
    case Job::Kind::kWrite:
      WriteRecord(job);
      break;
    case Job::Kind::kTouch:
      folder_.Touch(job.id, job.index);
      break;
    case Job::Kind::kPin:
      folder_.Pin(job.id, job.index, job.until_ns);
      break;
    case Job::Kind::kRemove:
      folder_.Remove(job.id);
      break;
  }
}

void RecordStore::WriteRecord(const Job& job) {
  {
    const std::lock_guard lock(mutex_);
    if (Now() < write_again_at_) {
      ++stats_.dropped_records;
      return;
    }
  }
  const double start = Now();
  FileError error = 0;
  if (config_.before_write) config_.before_write();
  if (!folder_.Exists(job.id)) {  // another process may have written it
    try {
      error = folder_.Write(job.id, job.index, job.tokens, job.payload);
    } catch (const std::exception&) {
      error = ENOMEM;
    }
  }
  const std::lock_guard lock(mutex_);
  stats_.write_seconds += Now() - start;
  if (error == 0) {
    stats_.written_bytes += std::ssize(job.payload);
    write_pause_ = 0;
    write_trouble_ = false;
    return;
  }
  ++stats_.write_errors;
  write_pause_ = std::clamp(2 * write_pause_, kMinWritePause, kMaxWritePause);
  write_again_at_ = Now() + write_pause_;
  Warn(write_trouble_, "pages cannot be written", std::strerror(error));
}

}  // namespace kvanta::store
