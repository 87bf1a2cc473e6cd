// One sequence's pages: owns the references, reserves the records that the next step needs (kv_cache_spec.h) and frees
// those that no later query reads. Pages that close are offered to the prefix cache, and an equal page there replaces
// the sequence's own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cache/block_table.h"
#include "cache/kv_cache_manager.h"

namespace kvanta::cache {

enum class Sharing : uint8_t {
  kShared,   // takes pages from the prefix cache and offers its own
  kPrivate,  // only evicts from it
};

class SequenceCache {
 public:
  // `manager` must outlive it.
  SequenceCache(KvCacheManager& manager, std::string salt, Sharing sharing = Sharing::kShared);
  ~SequenceCache();
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  // Takes the longest cached prefix of `tokens` in whole pages that leaves at least one token to compute and has, in
  // every group, the records that the next query reads. Only when empty. Returns Length().
  int64_t MatchPrefix(std::span<const int32_t> tokens);

  // Bytes that Reserve(count) would take.
  int64_t BytesToReserve(int64_t count) const noexcept;
  // Records for the next `count` tokens, evicting from the prefix cache where needed: all, or none and false.
  bool Reserve(int64_t count);
  // The reserved tokens are written: tokens[0, Length() + reserved) are the sequence's. Closed pages go to the prefix
  // cache.
  void Commit(std::span<const int32_t> tokens);
  // Gives every reference back; empty afterwards.
  void Clear() noexcept;
  // The same, at the end of the sequence of these tokens: the prefix cache may keep what lets a longer one go on here.
  void Finish(std::span<const int32_t> tokens);

  int64_t Length() const noexcept { return length_; }  // tokens whose K and V are in the cache
  int64_t Reserved() const noexcept { return reserved_; }
  BlockTables Pages() const noexcept { return tables_.data(); }
  int64_t PageCount() const noexcept { return static_cast<int64_t>(pages_.front().size()); }

 private:
  void Drop(int group, PageKind kind, PageId& page) noexcept;
  void Resize(size_t pages);
  void FreeInvisible() noexcept;
  void Share(std::span<const int32_t> tokens, int64_t index);
  void ShareExact(std::span<const int32_t> tokens, int64_t index);
  // Calls visit(group, kind, page's id) for every record that the next `count` tokens need and that is missing.
  template <class Visit>
  void VisitMissing(int64_t count, Visit visit);

  KvCacheManager& manager_;
  std::string salt_;
  Sharing sharing_;
  std::vector<BlockTable> pages_;       // [group], all of one length
  std::vector<const PageRef*> tables_;  // their data
  std::vector<int64_t> first_page_;     // [group]: pages below were freed
  std::vector<PageRef> records_;        // of the page that is shared
  int64_t length_ = 0;
  int64_t reserved_ = 0;
  int64_t exact_miss_ = -1;  // a page whose exact records would have made the last prefix hit longer
};

}  // namespace kvanta::cache
