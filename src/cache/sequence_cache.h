// KV cache of one sequence: owns the references to its pages, reserves the records for the next step
// (kv_cache_spec.h) and frees records that no later query reads. Closed pages are inserted into the prefix cache; an
// equal page there replaces the sequence's own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache/block_table.h"
#include "cache/held_records.h"
#include "cache/kv_cache_manager.h"
#include "cache/level_event.h"

namespace kvanta::cache {

enum class Sharing : uint8_t {
  kShared,   // uses and extends the prefix cache
  kPrivate,  // only evicts from the prefix cache
};

class SequenceCache {
 public:
  // `manager` must outlive the sequence cache.
  SequenceCache(KvCacheManager& manager, std::string salt, Sharing sharing = Sharing::kShared);
  ~SequenceCache();
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  // Attaches the longest cached prefix of `tokens` in whole pages that leaves at least one token to compute and for
  // which every group has the records that the next query reads. Requires an empty sequence. Returns Length().
  int64_t MatchPrefix(std::span<const int32_t> tokens);
  // Tokens of the longest prefix of `tokens` whose pages are cached: MatchPrefix attaches at most so many.
  int64_t CachedTokens(std::span<const int32_t> tokens) const;
  // Holds the records that MatchPrefix would attach.
  void HoldPrefix(std::span<const int32_t> tokens, HeldRecords& held) const;

  // At most `count` tokens, up to the next position at which states are rounded, or that of a level event which is
  // replayed: a step may not pass it.
  int64_t StepTokens(int64_t count) const noexcept;
  // Bytes that Reserve(count) would allocate.
  int64_t BytesToReserve(int64_t count) const noexcept;
  // Allocates all records for the next `count` tokens, evicting from the prefix cache as needed; on failure allocates
  // none and returns false.
  bool Reserve(int64_t count);
  // Marks the reserved tokens as written; tokens: the sequence's first Length() + Reserved() tokens. Inserts closed
  // pages into the prefix cache.
  void Commit(std::span<const int32_t> tokens);
  // Marks the `count` tokens after the committed ones as written. The page that holds them must have been reserved, and
  // they must leave it open.
  void Extend(int64_t count) noexcept;
  // Releases all references and empties the sequence.
  void Clear() noexcept;
  // Clears the finished sequence `tokens`; the prefix cache may keep the records that a longer prompt needs to continue
  // here.
  void Finish(std::span<const int32_t> tokens);

  // ---- precision by pressure (docs/pressure.md)

  // Events and pages by level at Length(); none without precision by pressure.
  std::optional<KvCacheRecord> Record() const;
  // Makes the empty sequence replay these events, and demotes no pages otherwise while it has fewer than `until`
  // tokens. It uses no cached prefix.
  void Replay(LevelEvents events, int64_t until);
  // Demotes pages as the events to replay at Length() say. False if memory is short; what was demoted stays so.
  bool ReplayEvents(std::span<const int32_t> tokens);
  // Clears the sequence, which replays its events when it is computed again.
  void Suspend(std::span<const int32_t> tokens);
  // Ends a replay that no memory suffices for.
  void EndReplay() noexcept;
  bool Replays() const noexcept { return replay_until_ > 0; }
  // Maximum bytes of the sequence with `tokens` tokens in a step of one page, of the events to replay as well.
  int64_t MaxBytes(int64_t tokens) const;
  // True if pages may be demoted now.
  bool IsDemotable() const noexcept { return replay_until_ <= length_ && next_event_ == replay_.size(); }
  // The first page from `page` on that is closed and at a level before `level`; -1: none.
  int64_t NextBefore(int level, int64_t page) const noexcept;
  // Level of a page, and its record of the first group that has one: sequences that share it share all.
  struct LevelRecord {
    int group = 0;
    int level = 0;
    PageId record = kNoPage;

    bool operator==(const LevelRecord&) const = default;
  };
  LevelRecord RecordOf(int64_t page) const noexcept;
  // Makes all queries from Length() on read `page` from `level`. Whoever else holds the records that it gives up does
  // so, too: the pool's reserve may be taken. False, without effect, if memory is short.
  bool Demote(std::span<const int32_t> tokens, int64_t page, int level);

  int64_t Length() const noexcept { return length_; }  // tokens with K and V in the cache
  int64_t Reserved() const noexcept { return reserved_; }
  BlockTables Pages() const noexcept { return tables_.data(); }
  int64_t PageCount() const noexcept { return static_cast<int64_t>(pages_.front().size()); }

 private:
  void Drop(int group, PageKind kind, PageId& page) noexcept;
  void Resize(size_t pages);
  void FreeInvisible() noexcept;
  void FreeAged(int64_t length_before) noexcept;
  void ShareAged(std::span<const int32_t> tokens, int64_t length_before, int64_t first_open);
  void Share(std::span<const int32_t> tokens, int64_t index);
  void ShareExact(std::span<const int32_t> tokens, int64_t index);
  bool WantsSnapshot(const KvCacheGroup& group, int64_t page) const noexcept;
  PageRef LastState(size_t group) const noexcept;
  void RestoreStates();
  void RoundStates();
  void ChangeState(size_t group, RecordChangeKind kind);
  bool OwnsLevels(int64_t page, std::span<const PageRef> cached) const noexcept;
  std::span<const PageRef> CachedRecords(std::span<const int32_t> tokens, int64_t page) const;
  bool DemoteRecords(std::span<const int32_t> tokens, int64_t page, int level, bool frees);
  void ReserveSnapshots(int64_t count);
  void ReplaceSnapshots(std::span<const int32_t> tokens, int64_t first, int64_t closed);
  // Calls visit(group, kind, page) for every missing record that the next `count` tokens need, until it returns false.
  template <class Visit>
  void VisitMissing(int64_t count, Visit visit) const;

  KvCacheManager& manager_;
  std::string salt_;
  Sharing sharing_;
  std::vector<BlockTable> pages_;       // [group], all of equal length
  std::vector<const PageRef*> tables_;  // data() of pages_
  std::vector<int64_t> first_page_;     // [group]: earlier pages were freed
  std::vector<PageRef> records_;        // [group], scratch of Share
  int64_t length_ = 0;
  int64_t reserved_ = 0;
  LevelEvents events_;
  LevelEvents replay_;  // events to replay, those before next_event_ are in events_
  size_t next_event_ = 0;
  int64_t replay_until_ = 0;  // length before which no other page is demoted
  bool is_replayable_ = true;
  int64_t missed_page_ = -1;  // page whose missing records (exact, or states) limited the last prefix hit; -1: none
  int64_t prompt_page_ = -1;  // last page at which a hit of the same prompt can end; -1: none
  // Last state of each recurrent group that this sequence added to the prefix cache: page and record.
  struct Snapshot {
    int64_t page = -1;
    PageId record = kNoPage;
  };
  std::vector<Snapshot> snapshots_;                 // [group]
  std::vector<std::pair<int, Snapshot>> replaced_;  // by group, scratch of Commit
};

}  // namespace kvanta::cache
