// Records of closed pages in the host's memory, below a GPU's: a page that leaves the GPU's memory need not be computed
// again. They end with the process. Total bytes are those of an arena; the least recently used records go first, but
// none before the records of later pages that cannot be used without it. Thread-safe; never waits.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/kv_cache_spec.h"
#include "store/host_arena.h"
#include "store/record_backend.h"

namespace kvanta::store {

class RecordMemory final : public RecordBackend {
 public:
  RecordMemory(std::shared_ptr<HostArena> arena, cache::KvCacheSpec spec);

  // Memory for the payload of a record, for which others are evicted. Empty if too much is being read or written.
  Buffer Allocate(int64_t bytes);

  std::string Name() const override;
  std::string NameOf(const RecordId& id) const override { return FileName(id); }
  int64_t BatchBytes() const noexcept override;
  bool NeedsHeader() const noexcept override { return false; }

  bool IsKnown(const RecordId& id) const override;
  // Every use counts.
  bool NeedsTouch(const RecordId& id) const override { return IsKnown(id); }
  void Invalidate(const RecordId& id) override { Remove({&id, 1}); }
  void Describe(CacheTierStats& stats) const override;

  void Open() override {}
  // Keeps the contents as they are. Those whose payload is not of Allocate() are not kept.
  WriteResult Write(std::span<const RecordToWrite> records) override;
  void Touch(std::span<const RecordUse> records) override;
  // Pinned records may take half of the arena; further ones are kept as others are.
  void Pin(std::span<const RecordUse> records, std::span<const int64_t> until_ns) override;
  void Remove(std::span<const RecordId> ids) override;

  std::string Find(std::span<const RecordId> ids, std::span<uint8_t> found) override;
  std::vector<ReadResult> Read(std::span<const RecordId> ids) override;

 private:
  struct Entry;
  using Order = std::tuple<int64_t, uint64_t, Entry*>;  // end of the pin, use, record
  struct Entry {
    RecordUse use;
    std::shared_ptr<const RecordContent> content;
    uint64_t used = 0;            // by a clock that counts uses
    int64_t pinned_until_ns = 0;  // 0: not pinned
    // Its node while it is not in order_, so that neither way needs memory.
    std::set<Order>::node_type place = {};

    int64_t Bytes() const noexcept { return static_cast<int64_t>(content->payload.bytes()); }
  };

  // With the mutex.
  bool IsNeeded(const Entry& entry) const;
  bool CanGo(const Entry& entry) const;
  template <class Change>
  void ForNeededRecords(const PageKey& page, Change change);
  void SetOrdered(Entry& entry, bool ordered) noexcept;
  void SetUse(Entry& entry, uint64_t used, int64_t pinned_until_ns) noexcept;
  // Throws std::bad_alloc, and changes nothing then.
  void Insert(const RecordToWrite& record);
  void Erase(Entry& entry) noexcept;
  void ExpirePins(int64_t now_ns);
  bool EvictOne();

  const std::shared_ptr<HostArena> arena_;
  const cache::KvCacheSpec spec_;
  mutable std::mutex mutex_;
  std::unordered_map<RecordId, Entry, RecordHash> entries_;
  std::unordered_map<PageKey, int64_t, PageKeyHash> continuations_;  // needed records of the pages after a page
  std::set<Order> order_;                                            // records that can go, the first to go first
  std::set<std::pair<int64_t, Entry*>> pins_;                        // by their end
  uint64_t clock_ = 0;
  int64_t pinned_bytes_ = 0, evictions_ = 0, refused_ = 0;
};

}  // namespace kvanta::store
