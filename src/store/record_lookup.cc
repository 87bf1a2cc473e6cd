// Lookups of the loading thread: which records there are, and whether reading them pays.
#include <algorithm>

#include "cache/prefix_hit.h"
#include "store/load.h"

namespace kvanta::store {
namespace {

constexpr double kRetrySeconds = 30;     // between loads that the rates speak against, which measure them anew
constexpr int64_t kMaxLookupPages = 64;  // asked for at once

// True if some hit reads the record.
bool MayBeRead(const cache::KvCacheGroup& group, int64_t page, cache::PageKind kind) {
  if (IsAged(kind)) return group.Reaches(kind, page);
  return kind == cache::PageKind::kQuantized ? group.NeedsQuantized(page, true)
                                             : group.NeedsExact(page, group.exact_before > 0);
}

}  // namespace

// Finds the longest hit with the store's records. kDone if it is no longer than without, or not worth loading.
LoadState RecordStore::FindRecords(Load& load) {
  load.stored.assign(load.present.size(), 0);
  PageKey key = RootKey(identity_, load.salt);
  bool may_continue = true;
  int64_t pages = 0;
  // Most lookups end at the first page, others far after it: each batch is twice the one before.
  for (int64_t batch = 1; pages < load.max_pages && may_continue; batch = std::min(2 * batch, kMaxLookupPages)) {
    const int64_t end = std::min(pages + batch, load.max_pages);
    for (int64_t page = pages; page < end; ++page) {
      key = ChildKey(key, load.TokensOf(spec_, page));
      load.keys.push_back(key);
    }
    for (size_t tier = 0; tier < tiers_.size(); ++tier) FindIn(tier, load, pages, end);
    while (pages < end && may_continue) may_continue = MayContinue(load, pages++);
  }
  load.max_pages = pages;
  return ChooseTiers(load);
}

// Asks a tier for the records of pages first..end that neither the memory nor a nearer tier has.
void RecordStore::FindIn(size_t tier, Load& load, int64_t first, int64_t end) {
  std::vector<RecordId> ids;
  std::vector<size_t> places;
  for (int64_t page = first; page < end; ++page) {
    for (int g = 0; g < static_cast<int>(spec_.groups.size()); ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        const size_t at = cache::RecordIndex(spec_, page, g, kind);
        if (load.present[at] != 0) load.memory_pages = page + 1;
        if ((load.present[at] | load.stored[at]) != 0) continue;
        if (!MayBeRead(spec_.groups[static_cast<size_t>(g)], page, kind)) continue;
        ids.push_back({load.keys[static_cast<size_t>(page)], g, kind});
        places.push_back(at);
      }
    }
  }
  if (ids.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    read_tier_ = tier;
  }
  std::vector<uint8_t> found(ids.size(), 0);
  const std::string error = tiers_[tier].backend->Find(ids, found);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (found[i] != 0) load.stored[places[i]] = static_cast<uint8_t>(tier + 1);
  }
  if (error.empty()) return;
  const std::lock_guard lock(mutex_);
  ++tiers_[tier].stats.read_errors;
  tiers_[tier].error_latch.Report(tiers_[tier].backend->Name(), "pages cannot be read", error);
}

// False if all hits beyond this page need a record of it that the store does not have.
bool RecordStore::MayContinue(const Load& load, int64_t page) const {
  for (size_t g = 0; g < spec_.groups.size(); ++g) {
    const cache::KvCacheGroup& group = spec_.groups[g];
    const auto has = [&](cache::PageKind kind) {
      const size_t at = cache::RecordIndex(spec_, page, static_cast<int>(g), kind);
      return (load.present[at] | load.stored[at]) != 0;
    };
    if (!group.visibility.IsFull() || !group.NeedsQuantized(page, true) || has(cache::PageKind::kQuantized)) continue;
    // A page that has aged is read from a later level: from the last one in the end.
    const bool ages = group.ages.IsUsed() && page >= group.ages.ageless;
    if (!ages || !has(cache::kAgedKinds[group.ages.Levels() - 1])) return false;
  }
  return true;
}

// Bytes of a hit of `hit` pages that are to be read of each tier.
std::vector<int64_t> RecordStore::BytesByTier(const Load& load, int64_t hit) const {
  std::vector<int64_t> bytes(tiers_.size(), 0);
  for (int64_t page = 0; page < hit; ++page) {
    for (size_t g = 0; g < spec_.groups.size(); ++g) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        const size_t at = cache::RecordIndex(spec_, page, static_cast<int>(g), kind);
        const bool is_read = ReadsAfterHit(spec_.groups[g], page, hit, kind) && load.present[at] == 0;
        if (is_read && load.stored[at] != 0)
          bytes[load.stored[at] - size_t{1}] += RecordBytes(static_cast<int>(g), kind);
      }
    }
  }
  return bytes;
}

// Leaves out the farthest tiers as long as what they add to the hit is not worth loading.
LoadState RecordStore::ChooseTiers(Load& load) {
  std::vector<int64_t> hits;  // [tiers]: with so many of them
  for (size_t tiers = 0; tiers <= tiers_.size(); ++tiers) {
    hits.push_back(Load::Hit(spec_, load.max_pages,
                             [&](size_t at) { return load.present[at] != 0 || (load.stored[at] - 1U) < tiers; }));
  }
  load.memory_hit = hits[0];
  const std::lock_guard lock(mutex_);
  for (size_t tier = 0; tier < tiers_.size(); ++tier) {
    tiers_[tier].stats.lookup_tokens += std::ssize(load.tokens) - hits[tier] * spec_.page_size;
  }
  for (size_t tier = tiers_.size(); tier-- > 0;) {
    load.hit = hits[tier + 1];
    const int64_t tokens = (load.hit - load.memory_hit) * spec_.page_size;
    if (load.hit > hits[tier] && IsWorthLoading(tier, BytesByTier(load, load.hit), tokens)) {
      load.added_tokens = tokens;
      return LoadState::kFound;
    }
    tiers_[tier].stats.declined_tokens += (load.hit - hits[tier]) * spec_.page_size;
    for (uint8_t& stored : load.stored) {
      if (stored == tier + 1) stored = 0;
    }
  }
  return LoadState::kDone;
}

// With the mutex. `tier` is the farthest that is read of.
bool RecordStore::IsWorthLoading(size_t tier, std::span<const int64_t> bytes, int64_t tokens) {
  double load_seconds = 0;
  for (size_t each = 0; each < tiers_.size(); ++each) {
    load_seconds += static_cast<double>(bytes[each]) * tiers_[each].seconds_per_byte.Value();
  }
  if (seconds_per_token_ == 0 || load_seconds <= static_cast<double>(tokens) * seconds_per_token_) return true;
  if (config_.now() - tiers_[tier].tried_at <= kRetrySeconds) return false;
  tiers_[tier].tried_at = config_.now();
  return true;
}

}  // namespace kvanta::store
