// Memory of all pages: for every KV cache group a pool of quantized records and one of exact (bf16) records, each of a
// fixed record size, under one byte budget. Reference-counted. Knows bytes, not tokens. Not thread-safe: one owner
// drives it.
#pragma once

#include <cstdint>
#include <memory>

#include "base/device.h"
#include "formats/scheme.h"

namespace kvanta::cache {

using PageId = int32_t;
inline constexpr PageId kNoPage = -1;

enum class PageKind : uint8_t { kQuantized, kExact };
inline constexpr PageKind kPageKinds[] = {PageKind::kQuantized, PageKind::kExact};

struct PagePoolConfig {
  int64_t budget_bytes = 0;    // upper bound of the memory of all records
  bool poison_unused = false;  // fill fresh and freed records with 0xFF (NaN in every float format); on in debug builds
};

class PagePool {
 public:
  // Reserves addresses, commits nothing. Throws InputError if the budget cannot hold one record of each pool, with the
  // figures.
  PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A record with one reference, or kNoPage when the budget is used up (the caller evicts and tries again).
  // Its bytes are undefined (0xFF when poisoned).
  PageId Allocate(int group, PageKind kind);
  void Retain(int group, PageKind kind, PageId page) noexcept;
  // Frees the record when the last reference goes.
  void Release(int group, PageKind kind, PageId page) noexcept;
  int References(int group, PageKind kind, PageId page) const noexcept;
  // Marks the reference that a prefix cache holds: the record counts as evictable while it is the only one.
  void SetCached(int group, PageKind kind, PageId page, bool cached) noexcept;

  // Base of a pool; record `id` starts at Base() + id * RecordBytes(). Both are fixed for life.
  uint8_t* Base(int group, PageKind kind) const noexcept;
  int64_t RecordBytes(int group, PageKind kind) const noexcept;  // 0 for kExact when no layer keeps exact pages

  int64_t BudgetBytes() const noexcept;
  int64_t UsedBytes() const noexcept;       // records with references
  int64_t EvictableBytes() const noexcept;  // of these, records that only a prefix cache references
  // Used records and free ones whose memory is kept, in the device's granules; never above the budget.
  int64_t CommittedBytes() const noexcept;
  int64_t UsedPages(int group, PageKind kind) const noexcept;
  // How many more of these records could be allocated now if nothing else is.
  int64_t FreePages(int group, PageKind kind) const noexcept;
  const formats::CacheLayout& Layout() const noexcept;
  int Groups() const noexcept;
  Device& device() const noexcept;

 private:
  struct Pool;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
