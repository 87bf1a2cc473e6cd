// Tiers of the prefix cache below the memory, in a GPU's host, on disk and in a server: copies closed pages to the page
// store as they enter the cache in memory, and moves stored pages of waiting requests into that cache, where their
// prefix match finds them. Pages are loaded for the next requests only, into memory that the scheduler reserves for
// these until they run. Needs the step lock, except for Loading().
#pragma once

#include <atomic>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/moving_mean.h"
#include "cache/kv_cache_manager.h"
#include "engine/request_state.h"
#include "scheduler/scheduler.h"
#include "store/record_store.h"

namespace kvanta::engine {

class StoreTiers final : public cache::RecordListener {
 public:
  // Requires an empty prefix cache. config.record_bytes is filled in. Throws InputError if the folder cannot be
  // created.
  StoreTiers(cache::KvCacheManager& cache, store::RecordStoreConfig config);
  ~StoreTiers() override;

  cache::PageKey RootKey(std::string_view salt) override;
  cache::PageKey ChildKey(const cache::PageKey& parent, std::span<const int32_t> tokens) override;
  void OnAttach(const cache::CachedRecord& record) noexcept override;
  void OnUse(const cache::CachedRecord& record) noexcept override;
  void OnDrop(const cache::CachedRecord& record) noexcept override;
  void OnPin(const cache::CachedRecord& record, double seconds) noexcept override;
  void OnRelease(const cache::CachedRecord& /*record*/) noexcept override {}

  // Looks up a request's prompt; the request is loading until Work() or Cancel() ends that.
  void Lookup(RequestState& request);
  void Cancel(RequestState& request) noexcept;
  // Moves pages that have been read into memory, begins the loads of the next requests that wait, and gives up those
  // that take longer than computing.
  void Work(scheduler::Scheduler& scheduler);
  // Loads what is stored of `tokens`, and waits for it.
  void LoadNow(std::span<const int32_t> tokens, std::string_view salt);
  // Loads that were given up.
  struct GivenUp {
    int64_t timeouts = 0;       // they took longer than computing, or no page came
    int64_t out_of_memory = 0;  // there was none for their pages
  };
  const GivenUp& LoadsGivenUp() const noexcept { return given_up_; }
  // Requests that are loading. Any thread.
  int Loading() const noexcept { return loading_; }
  // Measures what a prompt token costs: a step of `tokens` tokens took `seconds` in the model. Until then, all that is
  // stored is loaded.
  void RecordStep(int64_t tokens, double seconds);
  // Waits until everything is written.
  void Flush() { store_->Flush(); }
  store::RecordStore::Writes QueuedWrites() const { return store_->QueuedWrites(); }
  bool AreWritten(const store::RecordStore::Writes& writes) const { return store_->AreWritten(writes); }

  CacheTierStats HostStats() const { return store_->HostStats(); }
  CacheTierStats FolderStats() const { return store_->FolderStats(); }
  CacheTierStats ServerStats() const { return store_->ServerStats(); }
  std::string TakeWarning() { return store_->TakeWarning(); }

 private:
  // known: pages that the memory has.
  store::RecordStore::LoadHandle Find(std::span<const int32_t> tokens, std::string_view salt, int64_t& known);
  int64_t KnownPages(const RequestState& request) const;
  bool DetectLostPages(RequestState& request) const;
  void Copy(const cache::CachedRecord& record);
  // Seconds that a load of `tokens` tokens may take.
  double LoadTimeout(int64_t tokens) const noexcept;
  // State of a Work().
  struct Round {
    scheduler::Scheduler& scheduler;
    double now;
    int64_t budget;        // bytes that may be moved into memory
    bool is_full = false;  // a request found no memory: those after it do not try
  };
  bool Advance(RequestState& request, Round& round);
  bool BeginLoad(RequestState& request, Round& round);
  bool Renew(RequestState& request);
  // Takes pages of the load, at most about `budget` bytes, and holds them. False if there is no memory for more.
  bool TakePages(store::RecordStore::Load& load, std::span<const int32_t> tokens, std::string_view salt,
                 int64_t& budget, cache::HeldRecords& held);
  bool Insert(const store::LoadedPage& page, std::span<const int32_t> tokens, std::string_view salt,
              cache::HeldRecords& held);
  // Waits for the copies of payloads to the device, and frees these.
  void FinishCopies();
  void End(RequestState& request) noexcept;

  cache::KvCacheManager& cache_;
  const Clock now_;
  const std::shared_ptr<store::RecordStore> store_;
  bool inserting_ = false;  // records that enter the prefix cache come from the store
  MovingMean seconds_per_token_{0.2};
  std::atomic<int> loading_ = 0;
  GivenUp given_up_;
  std::vector<cache::PageRef> records_;  // [group], scratch of Insert
  std::vector<Buffer> copied_;           // payloads that the device may still read
};

}  // namespace kvanta::engine
