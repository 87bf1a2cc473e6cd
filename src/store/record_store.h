// Store of closed pages below the memory, in up to three places, the nearest first: the host's memory (below a GPU's),
// a folder, then a server that machines share. Threads of its own write after the steps and load ahead of them, so that
// no step waits. Its owner copies records in and out; nothing here knows of requests.
//
// Loading has two parts: a lookup finds how much longer a prefix's hit would be with the store's records, and whether
// loading them is worth it by the rates measured so far; then the owner begins the load, and takes pages as they come.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/moving_mean.h"
#include "cache/kv_cache_spec.h"
#include "kvanta/cache_folder.h"
#include "store/host_arena.h"
#include "store/record_writer.h"

namespace kvanta::store {

class RecordMemory;

// Time after which a read counts as hanging, and a load without a new page as stalled.
inline constexpr double kStallSeconds = 2;

struct RecordStoreConfig {
  std::shared_ptr<HostArena> memory;  // null: none
  std::string folder;                 // empty: none
  int64_t limit_bytes = 0;
  std::string server;  // URL, with its password (redis_server.h); empty: none
  int64_t server_ttl_seconds = 0;
  std::string identity;                                                         // as in RecordFolderConfig
  std::vector<std::array<int64_t, std::size(cache::kPageKinds)>> record_bytes;  // [group][kind]
  // A load has progressed, or everything is written; called on a thread of the store.
  std::function<void()> on_progress;
  std::function<void()> before_read;   // for tests: before each read, on the loading thread
  std::function<void()> before_write;  // likewise: before each write, on the writing threads
  Clock now = Now;                     // clock of waits, limits and rates
  double answer_seconds = 1;           // as in RedisServerConfig
};

struct LoadedPage {
  struct Record {
    int group = 0;
    cache::PageKind kind = cache::PageKind::kQuantized;
    Buffer payload;  // memory of the host
  };
  int64_t index = 0;
  std::vector<Record> records;  // may be empty: a page of which later queries read nothing

  int64_t Bytes() const noexcept {
    int64_t bytes = 0;
    for (const Record& record : records) bytes += static_cast<int64_t>(record.payload.bytes());
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

  // Throws InputError if the folder cannot be created, or the server's URL is invalid.
  static std::shared_ptr<RecordStore> Open(RecordStoreConfig config, const cache::KvCacheSpec& spec);
  // Writes what is queued, as long as the places take it, and ends the threads; bounded in time, whatever the places
  // do. Required once; nothing may be called afterwards.
  void Close() noexcept;
  ~RecordStore();
  RecordStore(const RecordStore&) = delete;
  RecordStore& operator=(const RecordStore&) = delete;

  const PageKey& Identity() const noexcept { return identity_; }

  // ---- write behind

  // Takes a record that entered the memory or was used there: it is written where it is not stored, and its time of
  // last use is renewed where it is. parent: key of the page before it; null for the first page. copy(to) copies its
  // bytes, and is called only if they are needed.
  void WriteBehind(const RecordUse& use, const PageKey* parent, std::span<const int32_t> tokens,
                   const std::function<void(uint8_t* to)>& copy);
  // Keeps a record, written or queued, for a time, in the places that can.
  void Pin(const RecordId& id, int64_t index, double seconds);
  // Removes a record, written or queued, that a later one replaces.
  void Drop(const RecordId& id);
  // Waits until everything is written, or a place hangs.
  void Flush();
  // Numbers of the jobs that have been queued, by place. AreWritten: true once they have ended, or while a place hangs.
  using Writes = std::array<int64_t, 3>;
  Writes QueuedWrites() const;
  bool AreWritten(const Writes& writes) const;

  // ---- load

  // Looks up the first max_pages pages of `tokens`, of which the memory has the records `present`: [page][group][kind].
  // Null while a read hangs.
  LoadHandle Lookup(std::span<const int32_t> tokens, std::string_view salt, int64_t max_pages,
                    std::vector<uint8_t> present);
  LoadState State(const Load& load) const;
  // Tokens by which a load extends the hit.
  int64_t Tokens(const Load& load) const;
  void Begin(const LoadHandle& load);
  // Time at which the loading thread last read something for the loads before this one; 0 if there are none.
  double LastMoveBefore(const Load& load) const;
  // Next page in order, if there is one.
  std::optional<LoadedPage> Take(Load& load);
  // overdue: because it took too long. That is a fault of the place, unless it was loads before this one that took
  // long.
  void Cancel(Load& load, bool overdue = false);
  // Seconds per prompt token that the owner measured, for the decision; 0: unknown.
  void SetComputeRate(double seconds_per_token);

  // Zeros for a place that the store does not have.
  CacheTierStats HostStats() const { return StatsOf(Place::kHost); }
  CacheTierStats FolderStats() const { return StatsOf(Place::kFolder); }
  CacheTierStats ServerStats() const { return StatsOf(Place::kServer); }
  // Message for the operator, one per failure; empty: none.
  std::string TakeWarning();

 private:
  enum class Place : uint8_t { kHost, kFolder, kServer };
  // A place, and what is known of it. But for the first three, guarded by the mutex.
  struct Tier {
    Place place{};
    std::unique_ptr<RecordBackend> backend;
    std::unique_ptr<RecordWriter> writer;
    MovingMean seconds_per_byte{0.1};
    double tried_at = 0;  // time of the last load that the rates spoke against
    CacheTierStats stats;
    ErrorLatch error_latch;
  };

  RecordStore(RecordStoreConfig config, const cache::KvCacheSpec& spec);
  int64_t RecordBytes(int group, cache::PageKind kind) const {
    return config_.record_bytes[static_cast<size_t>(group)][cache::KindIndex(kind)];
  }
  size_t MaxRecordBytes() const;
  void AddTier(Place place, std::unique_ptr<RecordBackend> backend);
  CacheTierStats StatsOf(Place place) const;

  // With the mutex.
  bool IsStalled() const;
  bool AwaitsTurn(const Load& load) const;

  // On the loading thread, without the mutex.
  void LoadLoop(const std::stop_token& stop, IoThread::Lock& lock);
  LoadState FindRecords(Load& load);
  void FindIn(size_t tier, Load& load, int64_t first, int64_t end);
  bool MayContinue(const Load& load, int64_t page) const;
  LoadState ChooseTiers(Load& load);
  std::vector<int64_t> BytesByTier(const Load& load, int64_t hit) const;
  bool IsWorthLoading(size_t tier, std::span<const int64_t> bytes, int64_t tokens);
  std::optional<LoadedPage> ReadPage(Load& load);
  std::string CheckRecord(ReadResult result, const RecordId& id, std::span<const int32_t> tokens,
                          LoadedPage::Record& record) const;
  bool ReadRecordOf(Load& load, int64_t page, LoadedPage::Record& record);
  void Fetch(size_t tier, Load& load, int64_t page);
  static void GiveUp(size_t tier, Load& load);
  void CountHit(const Load& load);

  const RecordStoreConfig config_;
  const cache::KvCacheSpec spec_;
  const PageKey identity_;

  mutable std::mutex mutex_;
  std::condition_variable_any load_work_;
  std::vector<Tier> tiers_;         // nearest first; at least one
  RecordMemory* memory_ = nullptr;  // memory of the first tier; null: none
  std::deque<LoadHandle> lookups_, loads_;
  int64_t buffered_bytes_ = 0;  // read and not yet taken
  size_t read_tier_ = 0;        // tier of the latest read
  double seconds_per_token_ = 0;
  IoThread loader_{mutex_, config_.now};
};

}  // namespace kvanta::store
