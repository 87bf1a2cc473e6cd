#include "engine/store_tiers.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "cache/held_records.h"

namespace kvanta::engine {
namespace {

constexpr int kLoadsAhead = 2;  // waiting requests that have their pages and memory before they can run
constexpr int64_t kBusyBytes = int64_t{16} << 20;      // moved into memory between two steps: a few milliseconds
constexpr double kLookupSeconds = 2;                   // after which a request is computed instead
constexpr double kMinLoadTimeout = 0.25;               // seconds
constexpr double kUnmeasuredLoadTimeout = 10;          // seconds, while the cost of computing is unknown
constexpr double kLoadTimeoutFactor = 2;               // times the cost of computing
constexpr int64_t kMeasuredTokens = 64;                // steps of fewer tokens say little about prompts
constexpr std::chrono::milliseconds kPollInterval(1);  // LoadNow polls at this interval

store::RecordStoreConfig WithRecordBytes(store::RecordStoreConfig config, const cache::KvCacheManager& cache) {
  for (int group = 0; group < cache.pool.Groups(); ++group) {
    auto& bytes = config.record_bytes.emplace_back();
    for (const cache::PageKind kind : cache::kPageKinds) {
      bytes[cache::KindIndex(kind)] = cache.pool.RecordBytes(group, kind);
    }
  }
  return config;
}

store::RecordId IdOf(const cache::CachedRecord& record) {
  return {record.key, record.group, record.kind};
}

}  // namespace

StoreTiers::StoreTiers(cache::KvCacheManager& cache, store::RecordStoreConfig config)
    : cache_(cache),
      now_(config.now),
      store_(store::RecordStore::Open(WithRecordBytes(std::move(config), cache), cache.spec)),
      records_(cache.spec.groups.size()) {
  cache_.prefix->AddListener(*this);
}

StoreTiers::~StoreTiers() {
  cache_.prefix->RemoveListener(*this);
  store_->Close();
}

cache::PageKey StoreTiers::RootKey(std::string_view salt) {
  return store::RootKey(store_->Identity(), salt);
}

cache::PageKey StoreTiers::ChildKey(const cache::PageKey& parent, std::span<const int32_t> tokens) {
  return store::ChildKey(parent, tokens);
}

void StoreTiers::Copy(const cache::CachedRecord& record) {
  store_->WriteBehind({IdOf(record), record.index}, record.parent, record.tokens, [&](uint8_t* to) {
    cache::PagePool& pool = cache_.pool;
    pool.device().CopyOut(to, pool.Record(record.group, record.kind, record.page),
                          static_cast<size_t>(pool.RecordBytes(record.group, record.kind)));
  });
}

void StoreTiers::OnAttach(const cache::CachedRecord& record) noexcept {
  OnUse(record);
}

void StoreTiers::OnUse(const cache::CachedRecord& record) noexcept {
  if (inserting_) return;
  try {
    Copy(record);
  } catch (const std::exception&) {  // no memory: the record stays in memory alone
  }
}

void StoreTiers::OnDrop(const cache::CachedRecord& record) noexcept {
  try {
    store_->Drop(IdOf(record));
  } catch (const std::exception&) {  // it is evicted in its time
  }
}

void StoreTiers::OnPin(const cache::CachedRecord& record, double seconds) noexcept {
  try {
    store_->Pin(IdOf(record), record.index, seconds);
  } catch (const std::exception&) {  // it is evicted in its time
  }
}

store::RecordStore::LoadHandle StoreTiers::Find(std::span<const int32_t> tokens, std::string_view salt,
                                                int64_t& known) {
  const int64_t max_pages = (std::ssize(tokens) - 1) / cache_.spec.page_size;
  if (max_pages == 0) return nullptr;
  std::vector<uint8_t> present;
  known = cache_.prefix->Present(tokens, salt, max_pages, present);
  return store_->Lookup(tokens, salt, max_pages, std::move(present));
}

void StoreTiers::Lookup(RequestState& request) {
  if (request.skip_prefix_match) return;
  request.last_lookup = {.preemptions = request.preemptions, .evictions = cache_.prefix->Evictions()};
  request.load = {.handle = Find(request.tokens, request.request.cache_salt, request.last_lookup.pages),
                  .deadline = now_() + kLookupSeconds};
  if (!request.load.handle || request.loading) return;
  request.loading = true;
  ++loading_;
}

// Looks a request up again whose load does not fit the memory any more. False if that cannot be.
bool StoreTiers::Renew(RequestState& request) {
  store_->Cancel(*request.load.handle);
  Lookup(request);
  if (request.load.handle) return true;
  ++given_up_.timeouts;  // a read hangs
  return false;
}

int64_t StoreTiers::KnownPages(const RequestState& request) const {
  return request.pages.CachedTokens(request.tokens) / cache_.spec.page_size;
}

// True if the memory lacks pages that it had at the last lookup or load: the request has been preempted since, or
// waited while others evicted them. Counts the evictions until now as seen.
bool StoreTiers::DetectLostPages(RequestState& request) const {
  LastLookup& last = request.last_lookup;
  if (request.skip_prefix_match) return false;
  if (request.preemptions > last.preemptions) return true;
  if (cache_.prefix->Evictions() == last.evictions) return false;
  last.evictions = cache_.prefix->Evictions();
  return KnownPages(request) < last.pages;
}

void StoreTiers::End(RequestState& request) noexcept {
  if (!request.loading) return;
  request.loading = false;
  --loading_;
}

void StoreTiers::Cancel(RequestState& request) noexcept {
  if (request.load.handle) store_->Cancel(*request.load.handle);
  request.load = {};
  request.awaits_memory = false;
  End(request);
}

double StoreTiers::LoadTimeout(int64_t tokens) const noexcept {
  if (seconds_per_token_.Value() == 0) return kUnmeasuredLoadTimeout;
  return std::max(kMinLoadTimeout, kLoadTimeoutFactor * static_cast<double>(tokens) * seconds_per_token_.Value());
}

void StoreTiers::RecordStep(int64_t tokens, double seconds) {
  if (tokens < kMeasuredTokens) return;
  seconds_per_token_.Add(seconds / static_cast<double>(tokens));
  store_->SetComputeRate(seconds_per_token_.Value());
}

void StoreTiers::Work(scheduler::Scheduler& scheduler) {
  const bool is_busy = scheduler.Running() > 0;
  Round round{
      .scheduler = scheduler, .now = now_(), .budget = is_busy ? kBusyBytes : std::numeric_limits<int64_t>::max()};
  int next = 0;  // requests that could run and have been passed
  for (scheduler::Sequence* sequence : scheduler.WaitingSequences()) {
    RequestState& request = RequestState::Of(*sequence);
    try {
      if (!request.load.handle && !request.reservation && next++ < kLoadsAhead && DetectLostPages(request)) {
        Lookup(request);
      }
      if (!request.load.handle) continue;
      request.awaits_memory = false;
      if (Advance(request, round)) continue;
    } catch (const std::exception&) {  // no memory for a page
      ++given_up_.out_of_memory;
    }
    Cancel(request);
    scheduler.EndPreparation(request);
  }
}

// One request's part of Work(). False to give its load up.
bool StoreTiers::Advance(RequestState& request, Round& round) {
  PrefixLoad& load = request.load;
  const store::LoadState state = store_->State(*load.handle);
  switch (state) {
    case store::LoadState::kLookup:
      break;
    case store::LoadState::kFound:
      return BeginLoad(request, round);
    case store::LoadState::kLoading:
    case store::LoadState::kDone: {
      if (store_->Tokens(*load.handle) == 0) return false;  // a lookup that found nothing
      if (!request.reservation) return Renew(request);      // its memory went to a request before it
      const int64_t before = round.budget;
      if (before > 0 && !TakePages(*load.handle, request.tokens, request.request.cache_salt, round.budget,
                                   request.reservation->held)) {
        ++given_up_.out_of_memory;
        return false;
      }
      if (round.budget != before) load.progress = round.now;
      if (round.budget <= 0) return true;
      if (state == store::LoadState::kDone) {
        load = {};
        request.last_lookup.evictions = cache_.prefix->Evictions();
        request.last_lookup.pages = KnownPages(request);
        request.prefix_tokens = request.last_lookup.pages * cache_.spec.page_size;
        End(request);  // it keeps its reservation
        return true;
      }
      break;
    }
  }
  load.progress = std::max(load.progress, store_->LastMoveBefore(*load.handle));
  const bool stalled = state == store::LoadState::kLoading && round.now - load.progress > store::kStallSeconds;
  if (round.now <= load.deadline && !stalled) return true;
  store_->Cancel(*load.handle, true);
  ++given_up_.timeouts;
  return false;
}

// Begins the load of a request that is among the next ones and has its memory. Until it is, others may pass.
bool StoreTiers::BeginLoad(RequestState& request, Round& round) {
  scheduler::Scheduler& scheduler = round.scheduler;
  if (!request.reservation) {
    if (cache_.spec.MaxBytes(std::ssize(request.tokens)) > cache_.pool.BudgetBytes()) return false;
    if (round.is_full || (scheduler.Prepared() >= kLoadsAhead && !scheduler.EndLastPreparation(&request))) return true;
    if (!scheduler.Prepare(request)) {
      // Memory comes back from those that run or are prepared, and those that wait before this one go first, too.
      const bool is_first = scheduler.WaitingSequences().front() == &request;
      if (is_first && scheduler.Running() == 0 && scheduler.Prepared() == 0) {
        ++given_up_.out_of_memory;
        return false;
      }
      request.awaits_memory = round.is_full = true;
      return true;
    }
    if (DetectLostPages(request)) return Renew(request);  // now the memory keeps what it has
  }
  store_->Begin(request.load.handle);
  request.load.deadline = round.now + LoadTimeout(store_->Tokens(*request.load.handle));
  request.load.progress = round.now;
  return true;
}

bool StoreTiers::TakePages(store::RecordStore::Load& load, std::span<const int32_t> tokens, std::string_view salt,
                           int64_t& budget, cache::HeldRecords& held) {
  bool complete = true;
  int64_t copied = 0;  // bytes
  while (budget > 0 && complete) {
    const std::optional<store::LoadedPage> page = store_->Take(load);
    if (!page) break;
    complete = Insert(*page, tokens, salt, held);
    budget -= 1 + page->Bytes();  // a page without records is progress, too
    copied += page->Bytes();
    if (copied >= kBusyBytes) {
      FinishCopies();
      copied = 0;
    }
  }
  FinishCopies();
  return complete;
}

void StoreTiers::FinishCopies() {
  if (copied_.empty()) return;
  cache_.pool.device().Synchronize();
  copied_.clear();
}

// Inserts a page after its predecessors, and holds its records. False if there is no memory, or if the predecessors
// have been evicted.
bool StoreTiers::Insert(const store::LoadedPage& page, std::span<const int32_t> tokens, std::string_view salt,
                        cache::HeldRecords& held) {
  cache::PagePool& pool = cache_.pool;
  cache::HeldRecords allocated(pool);  // until the cache has its own references
  allocated.Reserve(page.records.size());
  std::ranges::fill(records_, cache::PageRef{});
  for (const store::LoadedPage::Record& record : page.records) {
    const cache::PageId id = cache_.Allocate(record.group, record.kind, page.index);
    if (id == cache::kNoPage) return false;
    allocated.Adopt(record.group, record.kind, id);
    records_[static_cast<size_t>(record.group)].Of(record.kind) = id;
    copied_.push_back(record.payload);
    pool.device().CopyInAsync(pool.Record(record.group, record.kind, id), record.payload.data(),
                              record.payload.bytes());
  }
  bool complete = false;
  const auto end = static_cast<size_t>((page.index + 1) * cache_.spec.page_size);
  inserting_ = true;
  try {
    complete = cache_.prefix->Insert(tokens.first(end), salt, page.index, records_);
    for (const store::LoadedPage::Record& record : page.records) {  // the cache's records, where it had equal ones
      if (complete) held.Hold(record.group, record.kind, records_[static_cast<size_t>(record.group)].Of(record.kind));
    }
  } catch (const std::exception&) {
    complete = false;
  }
  inserting_ = false;
  return complete;
}

void StoreTiers::LoadNow(std::span<const int32_t> tokens, std::string_view salt) {
  int64_t known = 0;
  const store::RecordStore::LoadHandle load = Find(tokens, salt, known);
  if (!load) return;
  const double deadline = now_() + kUnmeasuredLoadTimeout;
  cache::HeldRecords held(cache_.pool);
  for (;;) {
    const store::LoadState state = store_->State(*load);
    if (state == store::LoadState::kFound) store_->Begin(load);
    int64_t budget = std::numeric_limits<int64_t>::max();
    if (!TakePages(*load, tokens, salt, budget, held) || now_() > deadline) {
      store_->Cancel(*load);
      return;
    }
    if (state == store::LoadState::kDone) return;
    std::this_thread::sleep_for(kPollInterval);
  }
}

}  // namespace kvanta::engine
