#include "scheduler/demotions.h"

namespace kvanta::scheduler {

// Demotes a page of sequences[owner] and of those after it that share it by one level. False if others share it, too,
// or one of them may not demote it now.
bool Demotions::Demote(std::span<Sequence* const> sequences, size_t owner, int64_t page) {
  const cache::SequenceCache::LevelRecord held = sequences[owner]->pages.RecordOf(page);
  const cache::PageKind kind = cache::LevelKind(held.level);
  const int references = cache_.pool.References(held.group, kind, held.record);
  const bool is_cached = cache_.pool.IsCached(held.group, kind, held.record);
  holders_.assign(1, sequences[owner]);
  if (references > (is_cached ? 2 : 1)) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      const cache::SequenceCache& pages = sequences[i]->pages;
      if (i == owner || page >= pages.PageCount() || pages.RecordOf(page) != held) continue;
      if (i < owner || !pages.IsDemotable()) return false;
      holders_.push_back(sequences[i]);
    }
    if (!is_cached || references != static_cast<int>(holders_.size()) + 1) return false;
  }
  for (Sequence* holder : holders_) {
    if (!holder->pages.Demote(holder->tokens, page, held.level + 1)) return holder != holders_.front();
  }
  return true;
}

bool Demotions::Free(std::span<Sequence* const> sequences, int64_t bytes) {
  if (!cache_.encode_levels) return false;
  const int64_t used = cache_.pool.UsedBytes();
  bool any = false;
  for (int level = 1; level <= cache_.spec.floors; ++level) {
    for (size_t owner = sequences.size(); owner-- > 0;) {
      const cache::SequenceCache& pages = sequences[owner]->pages;
      if (!pages.IsDemotable()) continue;
      for (int64_t page = pages.NextBefore(level, 0); page >= 0; page = pages.NextBefore(level, page + 1)) {
        if (!Demote(sequences, owner, page)) continue;
        any = true;
        if (used - cache_.pool.UsedBytes() >= bytes) return true;
      }
    }
  }
  return any;
}

}  // namespace kvanta::scheduler
