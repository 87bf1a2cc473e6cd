// Encoding of later levels when a page is demoted. The cache allocates the records; whoever knows the formats' codes
// sets the function that fills them (KvCacheManager::encode_levels).
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <span>

#include "cache/block_table.h"
#include "cache/kv_cache_spec.h"
#include "cache/page_pool.h"

namespace kvanta::cache {

// Encodes records of a group's later levels, by AgeIndex, from the quantized one; null: not wanted.
using LevelEncoder = std::function<void(int group, const uint8_t* quantized, std::span<uint8_t* const> later)>;

// Gives a page of all groups, [group], the records of `level` and of those after it that it lacks, with one reference
// each: where it has a quantized record. False, without effect, if allocate(group, kind) finds no memory.
template <class Allocate>
bool EncodeLevels(PagePool& pool, const LevelEncoder& encode, int floors, std::span<PageRef> page, int level,
                  Allocate allocate) {
  std::vector<RecordId> fresh;
  for (size_t g = 0; g < page.size(); ++g) {
    for (int each = level; each <= floors; ++each) {
      PageId& record = page[g].Of(LevelKind(each));
      if (page[g].quantized == kNoPage || record != kNoPage) continue;
      record = allocate(static_cast<int>(g), LevelKind(each));
      if (record != kNoPage) {
        fresh.push_back({.group = static_cast<int32_t>(g), .kind = LevelKind(each), .page = record});
        continue;
      }
      for (const RecordId& taken : fresh) {
        pool.Release(taken.group, taken.kind, taken.page);
        page[static_cast<size_t>(taken.group)].Of(taken.kind) = kNoPage;
      }
      return false;
    }
  }
  for (size_t g = 0; g < page.size(); ++g) {
    const int group = static_cast<int>(g);
    uint8_t* later[std::size(kAgedKinds)] = {};
    for (const RecordId& record : fresh) {
      if (record.group == group) later[AgeIndex(record.kind)] = pool.Record(group, record.kind, record.page);
    }
    if (later[0] == nullptr && later[1] == nullptr) continue;
    encode(group, pool.Record(group, PageKind::kQuantized, page[g].quantized), later);
  }
  return true;
}

}  // namespace kvanta::cache
