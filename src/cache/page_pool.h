// The memory of all pages: two pools of fixed-size records that share one byte budget. Quantized records hold one page
// of all layers in their formats; exact records hold one page in bf16 (open pages and sinks of schemes with exact
// pages). Reference-counted. Knows bytes, not tokens. Not thread-safe: one owner drives it.
#pragma once

#include <cstdint>
#include <memory>

#include "base/device.h"
#include "formats/scheme.h"

namespace kvanta::cache {

using PageId = int32_t;
inline constexpr PageId kNoPage = -1;

enum class PageKind : uint8_t { kQuantized, kExact };

struct PagePoolConfig {
  int64_t budget_bytes = 0;    // upper bound of committed records of both kinds
  bool poison_unused = false;  // fill fresh and freed records with 0xFF (NaN in every float format); on in debug builds
};

class PagePool {
 public:
  // Reserves addresses, commits nothing. Throws InputError if the budget cannot hold one record of each kind that the
  // layout has, with the figures.
  PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A record with one reference, or kNoPage when the budget is used up (the caller evicts and tries again).
  // Its bytes are undefined (0xFF when poisoned).
  PageId Allocate(PageKind kind);
  void Retain(PageKind kind, PageId page) noexcept;
  // Frees the record when the last reference goes.
  void Release(PageKind kind, PageId page) noexcept;
  int References(PageKind kind, PageId page) const noexcept;

  // Base of the pool; record `id` starts at Base(kind) + id * RecordBytes(kind). Both are fixed for life.
  uint8_t* Base(PageKind kind) const noexcept;
  int64_t RecordBytes(PageKind kind) const noexcept;  // 0 for kExact when no layer keeps exact pages

  int64_t BudgetBytes() const noexcept;
  int64_t UsedBytes() const noexcept;       // records with references, both kinds
  int64_t CommittedBytes() const noexcept;  // used records and free ones whose memory is kept; never above the budget
  int64_t UsedPages(PageKind kind) const noexcept;
  // How many more records of `kind` could be allocated now if nothing else is.
  int64_t FreePages(PageKind kind) const noexcept;
  const formats::CacheLayout& Layout() const noexcept;
  Device& device() const noexcept;

 private:
  struct Pool;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
