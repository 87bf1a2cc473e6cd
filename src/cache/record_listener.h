// Listeners of the prefix cache's records: how tiers below the memory and routers outside of the process learn of them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "cache/block_table.h"

namespace kvanta::cache {

// Bytes that pinned records may take of a memory or folder of `limit_bytes`: the rest remains a cache for all others.
constexpr int64_t MaxPinnedBytes(int64_t limit_bytes) noexcept {
  return limit_bytes / 2;
}

// Key of a page on the path from the root of a salt: depends on all token ids from the first on.
using PageKey = std::array<uint8_t, 32>;

struct CachedRecord {
  const PageKey& key;
  const PageKey* parent = nullptr;  // key of the page before it; null for the first page
  std::string_view salt;            // salt of the first page; empty for later ones
  std::span<const int32_t> tokens;  // the page's own
  int64_t index = 0;                // page number
  int group = 0;
  PageKind kind = PageKind::kQuantized;
  PageId page = kNoPage;
  PageRef records = {};  // of the page in this group, this one included
};

// Called by the owner of the prefix cache, inside its methods; must not change the cache. All listeners of a cache give
// its pages the same keys.
class RecordListener {
 public:
  virtual ~RecordListener() = default;
  virtual PageKey RootKey(std::string_view salt) = 0;
  virtual PageKey ChildKey(const PageKey& parent, std::span<const int32_t> tokens) = 0;
  virtual void OnAttach(const CachedRecord& record) noexcept = 0;  // a new record
  virtual void OnUse(const CachedRecord& record) noexcept = 0;     // part of a hit
  virtual void OnDrop(const CachedRecord& record) noexcept = 0;    // replaced by a later one; not called on eviction
  // To be kept for this time.
  virtual void OnPin(const CachedRecord& record, double seconds) noexcept = 0;
  virtual void OnRelease(const CachedRecord& record) noexcept = 0;  // leaves the memory, for whatever reason
};

}  // namespace kvanta::cache
