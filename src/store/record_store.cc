#include "store/record_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/quote.h"
#include "store/load.h"

namespace kvanta::store {
namespace {

constexpr int64_t kMaxQueuedBytes = int64_t{256} << 20;
constexpr double kMinWritePause = 1, kMaxWritePause = 60;  // seconds without writes after a failure

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
  loader_ = std::jthread([this](const std::stop_token& stop) { LoadLoop(stop); });
  writer_ = std::jthread([this](const std::stop_token& stop) { WriteLoop(stop); });
}

RecordStore::~RecordStore() = default;

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
  stats.evictions = usage.evictions;
  return stats;
}

bool RecordStore::Wants(const RecordId& id) {
  if (folder_.Knows(id)) return false;
  const int64_t bytes = RecordBytes(id.group, id.kind);
  const std::lock_guard lock(mutex_);
  if (queued_.contains(FileName(id))) return false;
  if (queued_bytes_ + bytes <= kMaxQueuedBytes && Now() >= write_again_at_) return true;
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
  jobs_.push_back({.kind = Job::Kind::kTouch, .id = id, .index = index, .tokens = {}, .payload = {}});
  write_work_.notify_one();
}

void RecordStore::Drop(const RecordId& id) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({.kind = Job::Kind::kRemove, .id = id, .index = 0, .tokens = {}, .payload = {}});
  write_work_.notify_one();
}

void RecordStore::Flush() {
  std::unique_lock lock(mutex_);
  write_idle_.wait(lock, [this] { return jobs_.empty(); });
}

void RecordStore::WriteLoop(const std::stop_token& stop) {
  folder_.Scan();  // before the first write, which may have to evict
  std::unique_lock lock(mutex_);
  for (;;) {
    write_work_.wait(lock, stop, [this] { return !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job& job = jobs_.front();  // others only append
    lock.unlock();
    Perform(job);
    lock.lock();
    if (job.kind == Job::Kind::kWrite) {
      queued_bytes_ -= std::ssize(job.payload);
      queued_.erase(FileName(job.id));
    }
    jobs_.pop_front();
    if (jobs_.empty()) write_idle_.notify_all();
  }
}

void RecordStore::Perform(const Job& job) {
  switch (job.kind) {
    case Job::Kind::kWrite:
      WriteRecord(job);
      break;
    case Job::Kind::kTouch:
      folder_.Touch(job.id, job.index);
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
