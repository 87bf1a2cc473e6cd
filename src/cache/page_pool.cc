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

// Pool of one group, kind and rank. Allocation order: free ids whose memory is still committed (last freed first, its
// bytes are most likely in a CPU cache), ids whose memory was decommitted, ids never used.
struct PagePool::Pool {
  struct Record {
    int32_t references = 0;
    bool cached = false;  // the prefix cache holds one of the references
  };
  std::unique_ptr<Reservation> memory;  // null: another rank has it
  int64_t record_bytes = 0;
  int64_t capacity = 0;  // records that fit the whole budget
  PageId first = 0;      // ids are [first, first + capacity)
  int64_t used = 0;
  int64_t evictable = 0;
  std::vector<Record> records;  // all ids used so far
  std::vector<PageId> free_committed;
  std::vector<PageId> released;

  size_t Offset(PageId page) const { return static_cast<size_t>(page - first) * Bytes(); }
  size_t Bytes() const { return static_cast<size_t>(record_bytes); }
  Record& Of(PageId page) { return records[static_cast<size_t>(page - first)]; }
  // Another rank's memory is counted in bytes.
  int64_t BytesToCommit(PageId page) const {
    return memory ? static_cast<int64_t>(memory->BytesToCommit(Offset(page), Bytes())) : record_bytes;
  }
  bool Commit(PageId page) { return !memory || memory->Commit(Offset(page), Bytes()); }
  // Returns the bytes that were given back.
  int64_t ReleaseMemory(PageId page) {
    if (!memory) return record_bytes;
    const auto bytes = static_cast<int64_t>(memory->BytesToRelease(Offset(page), Bytes()));
    memory->Release(Offset(page), Bytes());
    return bytes;
  }
};

// Records of one rank. Those that every rank has are counted in all shares, and listed in the first.
struct PagePool::Share {
  std::vector<Pool> pools = {};  // [group][kind]
  int64_t used_bytes = 0;
  int64_t evictable_bytes = 0;
  int64_t committed_bytes = 0;
  int64_t max_committed_bytes = 0;  // the budget, and the rest of a granule for each pool

  bool Fits(int64_t bytes) const { return committed_bytes + bytes <= max_committed_bytes; }
};

struct PagePool::State {
  Device& device;
  formats::CacheLayout layout;
  PagePoolConfig config;
  int64_t reserve_bytes = 0;
  std::vector<Share> shares = {};          // [rank]
  std::vector<RecordChange> changes = {};  // with lists_changes
  std::vector<bool> divided = {};          // [group]: pages are dealt to ranks

  static constexpr size_t kKinds = std::size(kPageKinds);
  bool IsDivided(size_t index) const { return divided[index / kKinds]; }  // of a pool
  // Calls visit(share, is_listed) for the shares that count a record of `share`, which lists it.
  template <class Visit>
  void ForShares(Share& share, size_t index, Visit visit) {
    if (IsDivided(index)) return visit(share, true);
    for (Share& each : shares) visit(each, &each == &share);
  }

  Share& Own() { return shares[static_cast<size_t>(config.rank)]; }
  Pool& Of(int group, PageKind kind) { return Own().pools[RecordIndex(group, kind)]; }
  // Rank of a record; config.ranks or more if the number is not one of a record.
  int64_t RankOf(int group, PageKind kind, PageId page) {
    const int64_t capacity = Of(group, kind).capacity;
    if (page < 0 || capacity == 0) return config.ranks;
    if (IsDivided(RecordIndex(group, kind))) return page / capacity;
    return page < capacity ? 0 : config.ranks;
  }
  Share& ShareOf(int group, PageKind kind, PageId page) {
    return shares[static_cast<size_t>(RankOf(group, kind, page))];
  }
  void Poison(const Pool& pool, PageId page) {
    if (config.poison_unused && pool.memory) device.Fill(pool.memory->data() + pool.Offset(page), 0xFF, pool.Bytes());
  }

  // Decommits a free record.
  void ReleaseFree(Share& share, size_t index) {
    Pool& pool = share.pools[index];
    const PageId page = pool.free_committed.back();
    pool.free_committed.pop_back();
    const int64_t bytes = pool.ReleaseMemory(page);
    ForShares(share, index,
              [&](Share& each, bool is_listed) { each.committed_bytes -= is_listed ? bytes : pool.record_bytes; });
    pool.released.push_back(page);
    if (!config.lists_changes) return;
    changes.push_back(
        {.record = {.group = static_cast<int32_t>(index / kKinds), .kind = kPageKinds[index % kKinds], .page = page}});
  }
  // Decommits free records that `share` counts, of other pools, until `bytes` more can be committed in it.
  bool MakeRoom(const Share& share, const Pool& keep, int64_t bytes) {
    for (Share& each : shares) {
      for (size_t index = 0; index < each.pools.size(); ++index) {
        if (&each != &share && (IsDivided(index) || &each != &shares.front())) continue;
        const Pool& pool = each.pools[index];
        while (&pool != &keep && !share.Fits(bytes) && !pool.free_committed.empty()) ReleaseFree(each, index);
      }
    }
    return share.Fits(bytes);
  }

  bool Commit(Share& share, size_t index, PageId page) {
    Pool& pool = share.pools[index];
    const int64_t bytes = pool.BytesToCommit(page);
    const auto of_share = [&](bool is_listed) { return is_listed ? bytes : pool.record_bytes; };
    bool fits = true;
    ForShares(share, index,
              [&](const Share& each, bool is_listed) { fits = fits && MakeRoom(each, pool, of_share(is_listed)); });
    if (!fits || !pool.Commit(page)) return false;
    ForShares(share, index, [&](Share& each, bool is_listed) { each.committed_bytes += of_share(is_listed); });
    return true;
  }

  // Applies `change` to a record and updates evictable_bytes.
  template <class Change>
  void Update(Share& share, size_t index, PageId page, Change change) {
    Pool& pool = share.pools[index];
    Pool::Record& record = pool.Of(page);
    const auto count = [&](int64_t sign) {
      if (!record.cached || record.references != 1) return;
      pool.evictable += sign;
      ForShares(share, index, [&](Share& each, bool) { each.evictable_bytes += sign * pool.record_bytes; });
    };
    count(-1);
    change(record);
    count(1);
  }
  template <class Change>
  void Update(int group, PageKind kind, PageId page, Change change) {
    Update(ShareOf(group, kind, page), RecordIndex(group, kind), page, change);
  }
};

PagePool::PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config)
    : state_(new State{.device = device, .layout = layout, .config = config}) {
  int64_t one_of_each = layout.page_bytes + layout.exact_page_bytes + layout.state_bytes;
  for (const int64_t bytes : layout.age_bytes) one_of_each += bytes;
  if (layout.page_bytes + layout.state_bytes <= 0 || config.budget_bytes < one_of_each) {
    throw InputError(
        fmt::format("KV cache memory of {} bytes is too small: one page of {} tokens takes {} bytes "
                    "quantized and {} bytes exact; give at least {} bytes",
                    config.budget_bytes, layout.page_size, layout.page_bytes, layout.exact_page_bytes, one_of_each));
  }
  const auto has_floor = [](const formats::LayerScheme& layer) { return layer.scheme.HasFloor(); };
  if (std::ranges::any_of(layout.layers, has_floor)) {
    for (const int64_t bytes : layout.age_bytes) state_->reserve_bytes += bytes;
  }
  state_->divided.assign(layout.groups.size(), true);
  for (const formats::LayerScheme& layer : layout.layers) {
    if (config.ranks > 1 && !layer.ReadsAllPages()) state_->divided[static_cast<size_t>(layer.group)] = false;
  }
  for (int rank = 0; rank < config.ranks; ++rank) {
    Share& share = state_->shares.emplace_back();
    share.max_committed_bytes = config.budget_bytes;
    for (const formats::GroupBytes& group : layout.groups) {
      for (const PageKind kind : kPageKinds) {
        const int64_t bytes = BytesOf(group, kind);
        const bool is_divided = state_->IsDivided(share.pools.size());
        Pool& pool = share.pools.emplace_back();
        pool.record_bytes = bytes;
        if (bytes == 0) continue;
        pool.capacity =
            std::min<int64_t>(config.budget_bytes / bytes, std::numeric_limits<PageId>::max() / config.ranks);
        pool.first = is_divided ? static_cast<PageId>(rank * pool.capacity) : 0;
        if (rank != config.rank) continue;
        pool.memory = device.Reserve(static_cast<size_t>(pool.capacity * bytes));
        share.max_committed_bytes += static_cast<int64_t>(pool.memory->Granularity()) - 1;
      }
    }
  }
}

PagePool::~PagePool() = default;

PageId PagePool::Allocate(int group, PageKind kind, int rank, bool from_reserve) {
  Share& share = state_->shares[static_cast<size_t>(rank)];
  const size_t index = RecordIndex(group, kind);
  Pool& pool = share.pools[index];
  const int64_t limit = BudgetBytes() - (from_reserve ? 0 : state_->reserve_bytes);
  bool fits = pool.record_bytes != 0;
  state_->ForShares(share, index,
                    [&](const Share& each, bool) { fits = fits && each.used_bytes + pool.record_bytes <= limit; });
  if (!fits) return kNoPage;
  PageId page = kNoPage;
  if (!pool.free_committed.empty()) {
    page = pool.free_committed.back();
    pool.free_committed.pop_back();
  } else if (!pool.released.empty()) {
    if (!state_->Commit(share, index, pool.released.back())) return kNoPage;
    page = pool.released.back();
    pool.released.pop_back();
  } else if (static_cast<int64_t>(pool.records.size()) < pool.capacity) {
    page = pool.first + static_cast<PageId>(pool.records.size());
    pool.records.emplace_back();
    pool.free_committed.reserve(pool.records.capacity());  // Release() must not allocate
    if (!state_->Commit(share, index, page)) {
      pool.records.pop_back();
      return kNoPage;
    }
  } else {
    return kNoPage;
  }
  assert(pool.Of(page).references == 0);
  pool.Of(page) = {.references = 1, .cached = false};
  ++pool.used;
  state_->ForShares(share, index, [&](Share& each, bool) { each.used_bytes += pool.record_bytes; });
  state_->Poison(pool, page);
  return page;
}

void PagePool::Retain(int group, PageKind kind, PageId page) noexcept {
  assert(References(group, kind, page) > 0);
  state_->Update(group, kind, page, [](Pool::Record& record) { ++record.references; });
}

void PagePool::Release(int group, PageKind kind, PageId page) noexcept {
  assert(References(group, kind, page) > 0);
  Share& share = state_->ShareOf(group, kind, page);
  const size_t index = RecordIndex(group, kind);
  Pool& pool = share.pools[index];
  state_->Update(share, index, page, [](Pool::Record& record) { --record.references; });
  if (pool.Of(page).references > 0) return;
  --pool.used;
  state_->ForShares(share, index, [&](Share& each, bool) { each.used_bytes -= pool.record_bytes; });
  pool.free_committed.push_back(page);
  state_->Poison(pool, page);
}

int PagePool::References(int group, PageKind kind, PageId page) const noexcept {
  const int64_t rank = state_->RankOf(group, kind, page);
  if (rank >= state_->config.ranks) return 0;
  if (state_->config.borrowed) return 1;
  Pool& pool = state_->shares[static_cast<size_t>(rank)].pools[RecordIndex(group, kind)];
  return page - pool.first < std::ssize(pool.records) ? pool.Of(page).references : 0;
}

void PagePool::SetCached(int group, PageKind kind, PageId page, bool cached) noexcept {
  state_->Update(group, kind, page, [cached](Pool::Record& record) { record.cached = cached; });
}

bool PagePool::IsCached(int group, PageKind kind, PageId page) const noexcept {
  return state_->ShareOf(group, kind, page).pools[RecordIndex(group, kind)].Of(page).cached;
}

// Not of a record unless this rank is the first: the sum is made of integers.
uint8_t* PagePool::Base(int group, PageKind kind) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  if (!pool.memory) return nullptr;
  return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(pool.memory->data()) -
                                    static_cast<uintptr_t>(pool.first) * pool.Bytes());
}

int64_t PagePool::RecordBytes(int group, PageKind kind) const noexcept {
  return state_->Of(group, kind).record_bytes;
}

uint8_t* PagePool::Record(int group, PageKind kind, PageId page) const noexcept {
  const Pool& pool = state_->Of(group, kind);
  return pool.memory->data() + pool.Offset(page);
}

int PagePool::Ranks() const noexcept {
  return state_->config.ranks;
}
int PagePool::RanksOfGroup(int group) const noexcept {
  return state_->divided[static_cast<size_t>(group)] ? state_->config.ranks : 1;
}
int PagePool::Rank() const noexcept {
  return state_->config.rank;
}
bool PagePool::IsOfRank(int group, PageKind kind, PageId page, int rank) const noexcept {
  const int64_t of_record = state_->RankOf(group, kind, page);
  return RanksOfGroup(group) == 1 ? of_record < state_->config.ranks : of_record == rank;
}

int64_t PagePool::BudgetBytes() const noexcept {
  return state_->config.budget_bytes;
}
int64_t PagePool::UsedBytes() const noexcept {
  return state_->Own().used_bytes;
}
int64_t PagePool::EvictableBytes() const noexcept {
  return state_->Own().evictable_bytes;
}
int64_t PagePool::AvailableBytes() const noexcept {
  int64_t bytes = BudgetBytes();
  for (const Share& share : state_->shares) {
    bytes = std::min(bytes, BudgetBytes() - ReserveBytes() - share.used_bytes + share.evictable_bytes);
  }
  return bytes;
}
int64_t PagePool::CommittedBytes() const noexcept {
  return state_->Own().committed_bytes;
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

std::vector<RecordChange> PagePool::TakeChanges() {
  return std::exchange(state_->changes, {});
}

void PagePool::ListChange(const RecordChange& change) {
  if (state_->config.lists_changes) state_->changes.push_back(change);
}

void PagePool::ReleaseMemory(const RecordId& record) noexcept {
  Pool& pool = state_->Of(record.group, record.kind);
  if (IsOfRank(record.group, record.kind, record.page, Rank())) pool.ReleaseMemory(record.page);
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
