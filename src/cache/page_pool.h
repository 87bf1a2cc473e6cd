// Page pool: memory of all KV cache pages. Each KV cache group has a pool for each kind of record (page_kind.h), each
// with a fixed record size; all share one byte budget. Records are reference-counted and
// independent of tokens. Not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/device.h"
#include "cache/page_kind.h"
#include "formats/scheme.h"

namespace kvanta::cache {

using PageId = int32_t;
inline constexpr PageId kNoPage = -1;

// Bytes of a group's record; 0 for a kind that no layer has.
int64_t BytesOf(const formats::GroupBytes& group, PageKind kind) noexcept;

struct PagePoolConfig {
  int64_t budget_bytes = 0;    // limit of the memory of all records
  bool poison_unused = false;  // fill fresh and freed records with 0xFF (NaN in every float format); on in debug builds
  // With several ranks, records have the same numbers in every rank. Rank 0's pool allocates them and lists the changes
  // that the others repeat; theirs are `borrowed`: every record counts as referenced.
  bool lists_changes = false;
  bool borrowed = false;
  // With context parallelism, pages are dealt to `ranks` ranks, each with budget_bytes. A record's number tells its
  // rank, and only that one has memory for it. `rank`: this process's. Records of groups whose queries do not read all
  // pages (formats::LayerScheme::ReadsAllPages) are whole on every rank.
  int ranks = 1;
  int rank = 0;
};

// Record of a pool.
struct RecordId {
  int32_t group = 0;
  PageKind kind = PageKind::kQuantized;
  PageId page = kNoPage;
};

enum class RecordChangeKind : uint8_t {
  kRelease,       // of the record's memory
  kRoundState,    // the record has a working state, which becomes that of its code (state_records.h)
  kRestoreState,  // the record gets the state of a code
};

// A change of a record that is not part of a forward pass.
struct RecordChange {
  RecordChangeKind kind = RecordChangeKind::kRelease;
  RecordId record;
  PageId coded = kNoPage;  // of states: the quantized record that has the code, or none
};

class PagePool {
 public:
  // Reserves address space without committing memory. Throws InputError, with the sizes, if the budget cannot hold one
  // record of each pool.
  PagePool(Device& device, const formats::CacheLayout& layout, PagePoolConfig config);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Allocates a record of `rank` with one reference; returns kNoPage when its budget is exhausted (the caller evicts
  // and retries). The record's bytes are undefined (0xFF if poison_unused). from_reserve: may take ReserveBytes, which
  // the caller gives back by releasing a larger record.
  PageId Allocate(int group, PageKind kind, int rank = 0, bool from_reserve = false);
  void Retain(int group, PageKind kind, PageId page) noexcept;
  // Drops a reference; frees the record with the last one.
  void Release(int group, PageKind kind, PageId page) noexcept;
  int References(int group, PageKind kind, PageId page) const noexcept;
  // Sets whether the prefix cache holds a reference. A record is evictable while that is its only reference.
  void SetCached(int group, PageKind kind, PageId page, bool cached) noexcept;
  bool IsCached(int group, PageKind kind, PageId page) const noexcept;

  // Base address of a pool; record `id` of this rank starts at Base() + id * RecordBytes(). Both are constant.
  uint8_t* Base(int group, PageKind kind) const noexcept;
  int64_t RecordBytes(int group, PageKind kind) const noexcept;  // 0 for a kind that no layer has
  // Address of a record, which must be one of this rank's.
  uint8_t* Record(int group, PageKind kind, PageId page) const noexcept;

  int Ranks() const noexcept;
  // Ranks that a group's pages are dealt to; 1: each has all of them.
  int RanksOfGroup(int group) const noexcept;
  // Rank that a page of a sequence is dealt to.
  int RankOfPage(int group, int64_t page) const noexcept { return static_cast<int>(page % RanksOfGroup(group)); }
  bool IsOwnPage(int group, int64_t page) const noexcept {
    return RanksOfGroup(group) == 1 || RankOfPage(group, page) == Rank();
  }
  int Rank() const noexcept;
  // True if the record, which must be one of the pool's, is one of `rank`.
  bool IsOfRank(int group, PageKind kind, PageId page, int rank) const noexcept;

  // Bytes of this rank:
  int64_t BudgetBytes() const noexcept;
  // Bytes of the budget for the later levels of a page that is demoted; 0 without precision by pressure.
  int64_t ReserveBytes() const noexcept;
  int64_t UsedBytes() const noexcept;       // referenced records
  int64_t EvictableBytes() const noexcept;  // referenced by the prefix cache only; included in UsedBytes
  // Bytes that the fullest rank could still give, without the reserve, if its evictable records were freed.
  int64_t AvailableBytes() const noexcept;
  // Memory, on this rank, of used records and of free records that stay committed, in the device's mapping granules:
  // within the budget, apart from the rest of a granule for each pool.
  int64_t CommittedBytes() const noexcept;
  int64_t UsedPages(int group, PageKind kind) const noexcept;
  int64_t EvictablePages(int group, PageKind kind) const noexcept;
  // Number of such records that could be allocated now without allocating others.
  int64_t FreePages(int group, PageKind kind) const noexcept;
  // Changes since the last call, in order, with `lists_changes`.
  std::vector<RecordChange> TakeChanges();
  // Lists the change of a state, with `lists_changes`.
  void ListChange(const RecordChange& change);
  // Releases the memory of a record of a borrowed pool, if it is one of this rank's.
  void ReleaseMemory(const RecordId& record) noexcept;
  const formats::CacheLayout& Layout() const noexcept;
  int Groups() const noexcept;
  Device& device() const noexcept;

 private:
  struct Pool;
  struct Share;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace kvanta::cache
