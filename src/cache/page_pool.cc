#include "cache/page_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <cassert>
#include <limits>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::cache {

// Ids are handed out from three places, in this order: free ids whose memory is still committed (last freed first: its
// bytes are likeliest in a cache), ids whose memory was given back, ids never used.
struct PagePool::Pool {
  std::unique_ptr<Reservation> memory;
  int64_t record_bytes = 0;
  int64_t capacity = 0;  // records that the whole budget would hold
  int64_t used = 0;
  std::vector<int32_t> references;  // of every id used so far
  std::vector<PageId> free_committed;
  std::vector<PageId> released;

  int64_t CommittedBytes() const { return (used + static_cast<int64_t>(free_committed.size())) * record_bytes; }
};

struct PagePool::State {
  Device& device;
  formats::CacheLayout layout;
  PagePoolConfig config;
  Pool pools[2];

  Pool& Of(PageKind kind) { return pools[static_cast<int>(kind)]; }
  Pool& Other(PageKind kind) { return pools[1 - static_cast<int>(kind)]; }

  uint8_t* Record(const Pool& pool, PageId page) const { return pool.memory->data() + page * pool.record_bytes; }
  void Poison(const Pool& pool, PageId page) {
    if (config.poison_unused) device.Fill(Record(pool, page), 0xFF, static_cast<size_t>(pool.record_bytes));
  }

  // Makes room for `bytes` more committed bytes by giving free records of `pool` back to the system.
  bool ReleaseFree(Pool& pool, int64_t bytes) {
    const auto fits = [&] {
      return pools[0].CommittedBytes() + pools[1].CommittedBytes() + bytes <= config.budget_bytes;
    };
    while (!fits() && !pool.free_committed.empty()) {
      const PageId page = pool.free_committed.back();
      pool.free_committed.pop_back();
      pool.memory->Release(static_cast<size_t>(page * pool.record_bytes), static_cast<size_t>(pool.record_bytes));
      pool.released.push_back(page);
    }
    return fits();
  }

  static bool Commit(Pool& pool, PageId page) {
    return pool.memory->Commit(static_cast<size_t>(page * pool.record_bytes), static_cast<size_t>(pool.record_bytes));
  }
};

PagePool::PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config)
    : state_(new State{device, layout, config, {}}) {
  const int64_t one_of_each = layout.page_bytes + layout.exact_page_bytes;
  if (layout.page_bytes <= 0 || config.budget_bytes < one_of_each) {
    throw InputError(
        fmt::format("KV cache memory of {} bytes is too small: one page of {} tokens takes {} bytes "
                    "quantized and {} bytes exact; give at least {} bytes",
                    config.budget_bytes, layout.page_size, layout.page_bytes, layout.exact_page_bytes, one_of_each));
  }
  const int64_t sizes[2] = {layout.page_bytes, layout.exact_page_bytes};
  for (int kind = 0; kind < 2; ++kind) {
    Pool& pool = state_->pools[kind];
    pool.record_bytes = sizes[kind];
    if (pool.record_bytes == 0) continue;
    pool.capacity = config.budget_bytes / pool.record_bytes;
    if (pool.capacity > std::numeric_limits<PageId>::max()) pool.capacity = std::numeric_limits<PageId>::max();
    pool.memory = device.Reserve(static_cast<size_t>(pool.capacity * pool.record_bytes));
  }
}

PagePool::~PagePool() = default;

PageId PagePool::Allocate(PageKind kind) {
  Pool& pool = state_->Of(kind);
  if (pool.record_bytes == 0) return kNoPage;
  PageId page = kNoPage;
  if (!pool.free_committed.empty()) {
    page = pool.free_committed.back();
    pool.free_committed.pop_back();
  } else if (!state_->ReleaseFree(state_->Other(kind), pool.record_bytes)) {
    return kNoPage;
  } else if (!pool.released.empty()) {
    if (!State::Commit(pool, pool.released.back())) return kNoPage;
    page = pool.released.back();
    pool.released.pop_back();
  } else if (static_cast<int64_t>(pool.references.size()) < pool.capacity) {
    page = static_cast<PageId>(pool.references.size());
    if (!State::Commit(pool, page)) return kNoPage;
    pool.references.push_back(0);
    pool.free_committed.reserve(pool.references.capacity());  // Release() must not allocate
  } else {
    return kNoPage;
  }
  assert(pool.references[page] == 0);
  pool.references[page] = 1;
  ++pool.used;
  state_->Poison(pool, page);
  return page;
}

void PagePool::Retain(PageKind kind, PageId page) noexcept {
  assert(References(kind, page) > 0);
  ++state_->Of(kind).references[page];
}

void PagePool::Release(PageKind kind, PageId page) noexcept {
  assert(References(kind, page) > 0);
  Pool& pool = state_->Of(kind);
  if (--pool.references[page] > 0) return;
  --pool.used;
  pool.free_committed.push_back(page);
  state_->Poison(pool, page);
}

int PagePool::References(PageKind kind, PageId page) const noexcept {
  const Pool& pool = state_->Of(kind);
  return page >= 0 && page < static_cast<PageId>(pool.references.size()) ? pool.references[page] : 0;
}

uint8_t* PagePool::Base(PageKind kind) const noexcept {
  const Pool& pool = state_->Of(kind);
  return pool.memory ? pool.memory->data() : nullptr;
}

int64_t PagePool::RecordBytes(PageKind kind) const noexcept {
  return state_->Of(kind).record_bytes;
}
int64_t PagePool::BudgetBytes() const noexcept {
  return state_->config.budget_bytes;
}

int64_t PagePool::UsedBytes() const noexcept {
  return state_->pools[0].used * state_->pools[0].record_bytes + state_->pools[1].used * state_->pools[1].record_bytes;
}

int64_t PagePool::CommittedBytes() const noexcept {
  return state_->pools[0].CommittedBytes() + state_->pools[1].CommittedBytes();
}

int64_t PagePool::UsedPages(PageKind kind) const noexcept {
  return state_->Of(kind).used;
}

int64_t PagePool::FreePages(PageKind kind) const noexcept {
  const Pool& pool = state_->Of(kind);
  if (pool.record_bytes == 0) return 0;
  return std::min((BudgetBytes() - UsedBytes()) / pool.record_bytes, pool.capacity - pool.used);
}

const formats::CacheLayout& PagePool::Layout() const noexcept {
  return state_->layout;
}
Device& PagePool::device() const noexcept {
  return state_->device;
}

}  // namespace kvanta::cache
