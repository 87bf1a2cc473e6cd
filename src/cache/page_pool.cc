#include "cache/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::cache {

int64_t BytesOf(const formats::GroupBytes& group, PageKind kind) noexcept {
  if (IsAged(kind)) return group.age_bytes[AgeIndex(kind)];
  return kind == PageKind::kExact ? group.exact_page_bytes : group.page_bytes;
}

// Pool of one group and kind. Allocation order: free ids whose memory is still committed (last freed first, its bytes
// are most likely in a CPU cache), ids whose memory was decommitted, ids never used.
struct PagePool::Pool {
  struct Record {
    int32_t references = 0;
    bool cached = false;  // the prefix cache holds one of the references
  };
  std::unique_ptr<Reservation> memory;
  int64_t record_bytes = 0;
  int64_t capacity = 0;  // records that fit the whole budget
  int64_t used = 0;
  int64_t evictable = 0;
  std::vector<Record> records;  // all ids used so far
  std::vector<PageId> free_committed;
  std::vector<PageId> released;

  size_t Offset(PageId page) const { return static_cast<size_t>(page) * static_cast<size_t>(record_bytes); }
  size_t Bytes() const { return static_cast<size_t>(record_bytes); }
};

struct PagePool::State {
  Device& device;
  formats::CacheLayout layout;
  PagePoolConfig config;
  std::vector<Pool> pools;  // [group][kind]
  int64_t reserve_bytes = 0;
  int64_t used_bytes = 0;
  int64_t evictable_bytes = 0;
  int64_t committed_bytes = 0;
  int64_t max_committed_bytes = 0;      // the budget, and the rest of a granule for each pool
  std::vector<RecordId> released = {};  // with lists_released

  Pool& Of(int group, PageKind kind) { return pools[RecordIndex(group, kind)]; }
  void Poison(const Pool& pool, PageId page) {
    if (config.poison_unused) device.Fill(pool.memory->data() + pool.Offset(page), 0xFF, pool.Bytes());
  }
  bool Fits(int64_t bytes) const { return committed_bytes + bytes <= max_committed_bytes; }

  // Decommits free records of the other pools until `bytes` more can be committed.
  bool ReleaseFree(const Pool& keep, int64_t bytes) {
    for (Pool& pool : pools) {
      while (&pool != &keep && !Fits(bytes) && !pool.free_committed.empty()) {
        const PageId page = pool.free_committed.back();
        pool.free_committed.pop_back();
        committed_bytes -= static_cast<int64_t>(pool.memory->BytesToRelease(pool.Offset(page), pool.Bytes()));
        pool.memory->Release(pool.Offset(page), pool.Bytes());
        pool.released.push_back(page);
        if (!config.lists_released) continue;
        const auto index = static_cast<int32_t>(&pool - pools.data());
        constexpr auto kKinds = static_cast<int32_t>(std::size(kPageKinds));
        released.push_back({.group = index / kKinds, .kind = kPageKinds[index % kKinds], .page = page});
      }
    }
    return Fits(bytes);
  }

  bool Commit(Pool& pool, PageId page) {
    const auto bytes = static_cast<int64_t>(pool.memory->BytesToCommit(pool.Offset(page), pool.Bytes()));
    if (!ReleaseFree(pool, bytes) || !pool.memory->Commit(pool.Offset(page), pool.Bytes())) return false;
    committed_bytes += bytes;
    return true;
  }

  // Applies `change` to a record and updates evictable_bytes.
  template <class Change>
  void Update(Pool& pool, PageId page, Change change) {
    Pool::Record& record = pool.records[static_cast<size_t>(page)];
    const auto count = [&](int64_t sign) {
      if (!record.cached || record.references != 1) return;
      pool.evictable += sign;
      evictable_bytes += sign * pool.record_bytes;
    };
    count(-1);
    change(record);
    count(1);
  }
};

PagePool::PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config)
    : state_(new State{.device = device, .layout = layout, .config = config, .pools = {}}) {
  int64_t one_of_each = layout.page_bytes + layout.exact_page_bytes + layout.state_bytes;
  for (const int64_t bytes : layout.age_bytes) one_of_each += bytes;
  if (layout.page_bytes + layout.state_bytes <= 0 || config.budget_bytes < one_of_each) {
    throw InputError(
        fmt::format("KV cache memory of {} bytes is too small: one page of {} tokens takes {} bytes "
                    "quantized and {} bytes exact; give at least {} bytes",
                    config.budget_bytes, layout.page_size, layout.page_bytes, layout.exact_page_bytes, one_of_each));
  }
  state_->max_committed_bytes = config.budget_bytes;
  const auto has_floor = [](const formats::LayerScheme& layer) { return layer.scheme.HasFloor(); };
  if (std::ranges::any_of(layout.layers, has_floor)) {
    for (const int64_t bytes : layout.age_bytes) state_->reserve_bytes += bytes;
  }
  for (const formats::GroupBytes& group : layout.groups) {
    for (const PageKind kind : kPageKinds) {
      const int64_t bytes = BytesOf(group, kind);
      Pool& pool = state_->pools.emplace_back();
      pool.record_bytes = bytes;
      if (bytes == 0) continue;
      pool.capacity = std::min<int64_t>(config.budget_bytes / bytes, std::numeric_limits<PageId>::max());
      pool.memory = device.Reserve(static_cast<size_t>(pool.capacity * bytes));
      state_->max_committed_bytes += static_cast<int64_t>(pool.memory->Granularity()) - 1;
    }
  }
}

PagePool::~PagePool() = default;

PageId PagePool::Allocate(int group, PageKind kind, bool from_reserve) {
  Pool& pool = state_->Of(group, kind);
  const int64_t limit = BudgetBytes() - (from_reserve ? 0 : state_->reserve_bytes);
  if (pool.record_bytes == 0 || state_->used_bytes + pool.record_bytes > limit) return kNoPage;
  PageId page = kNoPage;
  if (!pool.free_committed.empty()) {
    page = pool.free_committed.back();
    pool.free_committed.pop_back();
  } else if (!pool.released.empty()) {
    if (!state_->Commit(pool, pool.released.back())) return kNoPage;
    page = pool.released.back();
    pool.released.pop_back();
  } else if (static_cast<int64_t>(pool.records.size()) < pool.capacity) {
    page = static_cast<PageId>(pool.records.size());
    pool.records.emplace_back();
    pool.free_committed.reserve(pool.records.capacity());  // Release() must not allocate
    if (!state_->Commit(pool, page)) {
      pool.records.pop_back();
      return kNoPage;
    }
  } else {
    return kNoPage;
  }
  assert(pool.records[page].references == 0);
  pool.records[static_cast<size_t>(page)] = {.references = 1, .cached = false};
  ++pool.used;
  state_->used_bytes += pool.record_bytes;
  state_->Poison(pool, page);
  return page;
}

void PagePool::Retain(int group, PageKind kind, PageId page) noexcept {
  assert(References(group, kind, page) > 0);
  state_->Update(state_->Of(group, kind), page, [](Pool::Record& record) { ++record.references; });
}

void PagePool::Release(int group, PageKind kind, PageId page) noexcept {
  assert(References(group, kind, page) > 0);
  Pool& pool = state_->Of(group, kind);
  state_->Update(pool, page, [](Pool::Record& record) { --record.references; });
  if (pool.records[static_cast<size_t>(page)].references > 0) return;
  --pool.used;
  state_->used_bytes -= pool.record_bytes;
  pool.free_committed.push_back(page);
  state_->Poison(pool, page);
}

int PagePool::References(int group, PageKind kind, PageId page) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  if (state_->config.borrowed) return page >= 0 && page < pool.capacity ? 1 : 0;
  return page >= 0 && page < static_cast<PageId>(pool.records.size())
             ? pool.records[static_cast<size_t>(page)].references
             : 0;
}

void PagePool::SetCached(int group, PageKind kind, PageId page, bool cached) noexcept {
  state_->Update(state_->Of(group, kind), page, [cached](Pool::Record& record) { record.cached = cached; });
}

bool PagePool::IsCached(int group, PageKind kind, PageId page) const noexcept {
  return state_->Of(group, kind).records[static_cast<size_t>(page)].cached;
}

uint8_t* PagePool::Base(int group, PageKind kind) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  return pool.memory ? pool.memory->data() : nullptr;
}

int64_t PagePool::RecordBytes(int group, PageKind kind) const noexcept {
  return state_->Of(group, kind).record_bytes;
}

uint8_t* PagePool::Record(int group, PageKind kind, PageId page) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  return pool.memory->data() + pool.Offset(page);
}

int64_t PagePool::BudgetBytes() const noexcept {
  return state_->config.budget_bytes;
}
int64_t PagePool::UsedBytes() const noexcept {
  return state_->used_bytes;
}
int64_t PagePool::EvictableBytes() const noexcept {
  return state_->evictable_bytes;
}
int64_t PagePool::CommittedBytes() const noexcept {
  return state_->committed_bytes;
}

int64_t PagePool::ReserveBytes() const noexcept {
  return state_->reserve_bytes;
}

int64_t PagePool::EvictablePages(int group, PageKind kind) const noexcept {
  return state_->Of(group, kind).evictable;
}

int64_t PagePool::UsedPages(int group, PageKind kind) const noexcept {
  return state_->Of(group, kind).used;
}

int64_t PagePool::FreePages(int group, PageKind kind) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  if (pool.record_bytes == 0) return 0;
  return std::min((BudgetBytes() - UsedBytes()) / pool.record_bytes, pool.capacity - pool.used);
}

std::vector<RecordId> PagePool::TakeReleased() {
  return std::exchange(state_->released, {});
}

void PagePool::ReleaseMemory(const RecordId& record) noexcept {
  Pool& pool = state_->Of(record.group, record.kind);
  pool.memory->Release(pool.Offset(record.page), pool.Bytes());
}

const formats::CacheLayout& PagePool::Layout() const noexcept {
  return state_->layout;
}
int PagePool::Groups() const noexcept {
  return static_cast<int>(state_->layout.groups.size());
}
Device& PagePool::device() const noexcept {
  return state_->device;
}

}  // namespace kvanta::cache
