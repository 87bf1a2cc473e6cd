// Store of closed pages below the memory: writes behind and loads ahead on threads of its own, so that no step waits
// for a disk. Its owner copies records in and out; nothing here knows of requests.
//
// Loading has two parts: a lookup finds how much longer a prefix's hit would be with the store's records, and whether
// loading them is worth it by the rates measured so far; then the owner begins the load, and takes pages as they come.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "cache/kv_cache_spec.h"
#include "kvanta/cache_folder.h"
#include "store/record_folder.h"

namespace kvanta::store {

struct RecordStoreConfig {
  std::string folder;
  int64_t limit_bytes = 0;
  std::string identity;                              // as in RecordFolderConfig
  std::vector<std::array<int64_t, 2>> record_bytes;  // [group][kind]
  std::function<void()> on_progress;                 // a load has news; called on a thread of the store
  std::function<void()> before_read;                 // for tests: before each file is read, on the loading thread
  std::function<void()> before_write;                // likewise: before each file is written, on the writing thread
};

struct LoadedPage {
  struct Record {
    int group = 0;
    cache::PageKind kind = cache::PageKind::kQuantized;
    std::vector<uint8_t> bytes;
  };
  int64_t index = 0;
  std::vector<Record> records;  // may be empty: a page of which later queries read nothing

  int64_t Bytes() const noexcept {
    int64_t bytes = 0;
    for (const Record& record : records) bytes += std::ssize(record.bytes);
    return bytes;
  }
};

enum class LoadState : uint8_t {
  kLookup,   // the lookup has not ended
  kFound,    // records can be loaded: Begin()
  kLoading,  // pages come
  kDone,     // nothing more will come
};

// Its threads share its ownership: one that hangs in the system is left behind by Close().
class RecordStore {
 public:
  struct Load;
  using LoadHandle = std::shared_ptr<Load>;

  // Throws InputError if the folder cannot be created.
  static std::shared_ptr<RecordStore> Open(RecordStoreConfig config, const cache::KvCacheSpec& spec);
  // Writes what is queued, as long as the disk works, and ends the threads; bounded in time, whatever the disk does.
  // Required once; nothing may be called afterwards.
  void Close() noexcept;
  ~RecordStore();
  RecordStore(const RecordStore&) = delete;
  RecordStore& operator=(const RecordStore&) = delete;

  const PageKey& Identity() const noexcept { return folder_.Identity(); }

  // ---- write behind

  // True if the record should be written: it is not stored, and neither is the queue full nor does the disk fail.
  bool Wants(const RecordId& id);
  // Queues a record of page `index`.
  void Write(const RecordId& id, int64_t index, std::span<const int32_t> tokens, std::vector<uint8_t> payload);
  // Renews the time of last use of a stored record, unless that was a moment ago.
  void Touch(const RecordId& id, int64_t index);
  // Keeps a record, written or queued, for a time: others are evicted before it.
  void Pin(const RecordId& id, int64_t index, double seconds);
  // Removes a record, written or queued, that a later one replaces.
  void Drop(const RecordId& id);
  // Waits until the queue is empty, or the disk hangs.
  void Flush();

  // ---- load

  // Looks up the first max_pages pages of `tokens`, of which the memory has the records `present`: [page][group][kind].
  // Null while the disk hangs.
  LoadHandle Lookup(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                    std::vector<uint8_t> present);
  LoadState State(const Load& load) const;
  // Tokens by which a load extends the hit.
  int64_t Tokens(const Load& load) const;
  void Begin(const LoadHandle& load);
  // Next page in order, if there is one.
  std::optional<LoadedPage> Take(Load& load);
  // overdue: because it took too long.
  void Cancel(Load& load, bool overdue = false);
  // Seconds per prompt token that the owner measured, for the decision; 0: unknown.
  void SetComputeRate(double seconds_per_token);

  CacheFolderStats Stats() const;
  // Message for the operator, one per trouble; empty: none.
  std::string TakeWarning();

 private:
  struct Job {
    enum class Kind : uint8_t { kWrite, kTouch, kPin, kRemove };
    Kind kind = Kind::kWrite;
    RecordId id;
    int64_t index = 0;
    std::vector<int32_t> tokens;
    std::vector<uint8_t> payload;
    int64_t until_ns = 0;  // of kPin, since 1970
  };

  int64_t RecordBytes(int group, cache::PageKind kind) const {
    return config_.record_bytes[static_cast<size_t>(group)][cache::KindIndex(kind)];
  }

  RecordStore(RecordStoreConfig config, const cache::KvCacheSpec& spec);
  // With the mutex.
  void Queue(Job job);
  bool IsStalled() const;
  bool WriterHangs() const;
  void Warn(bool& warned, const char* what, const std::string& why);

  // Joins a thread, or leaves it behind if it is in the system after `deadline`.
  void End(std::jthread& thread, const bool& ended, const double& in_system_since, double deadline) noexcept;

  // On the writing thread.
  void WriteLoop(const std::stop_token& stop);
  void Perform(const Job& job);
  void WriteRecord(const Job& job);

  // On the loading thread, without the mutex.
  void LoadLoop(const std::stop_token& stop);
  LoadState FindRecords(Load& load);
  bool IsWorthLoading(int64_t bytes, int64_t tokens);
  std::optional<LoadedPage> ReadPage(Load& load);
  bool ReadRecordOf(Load& load, int64_t page, LoadedPage::Record& record);

  const RecordStoreConfig config_;
  const cache::KvCacheSpec spec_;
  RecordFolder folder_;

  mutable std::mutex mutex_;
  std::condition_variable_any write_work_, write_idle_, load_work_, thread_ended_;
  std::deque<Job> jobs_;  // the first is the one in progress
  int64_t queued_bytes_ = 0;
  std::unordered_set<std::string> queued_;  // names of queued records
  double write_again_at_ = 0;               // writes are off until then
  double write_pause_ = 0;
  std::deque<LoadHandle> lookups_, loads_;
  int64_t buffered_bytes_ = 0;  // read and not yet taken
  double read_since_ = 0;       // begin of the read in progress; 0: none
  double write_since_ = 0;      // likewise of the job that the writing thread performs
  double close_by_ = 0;         // end of writing what is queued, after Close()
  bool loader_ended_ = false, writer_ended_ = false;
  double seconds_per_byte_ = 0;
  double seconds_per_token_ = 0;
  double tried_at_ = 0;  // time of the last load that the rates spoke against
  CacheFolderStats stats_;
  std::string warning_;
  bool write_trouble_ = false, read_trouble_ = false;  // the operator has been warned
  std::jthread loader_, writer_;
};

}  // namespace kvanta::store
