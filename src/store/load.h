// Load of a prefix from the store. Until it is done, the loading thread owns all but what the store's mutex guards.
#pragma once

#include <unordered_map>

#include "cache/prefix_hit.h"
#include "store/record_store.h"

namespace kvanta::store {

struct RecordStore::Load {
  std::vector<int32_t> tokens;  // tokens of max_pages pages
  std::string salt;
  int64_t max_pages = 0;
  std::vector<uint8_t> present;                    // [page][group][kind]: in memory, or read
  std::vector<uint8_t> stored;                     // likewise: 1 + the tier that has it, 0: none
  std::vector<PageKey> keys;                       // [page]
  int64_t memory_pages = 0;                        // pages of which the memory has a record
  int64_t memory_hit = 0;                          // pages of the hit without the store
  int64_t hit = 0;                                 // and with it
  int64_t next_page = 0;                           // first page that may lack a record
  std::unordered_map<size_t, ReadResult> fetched;  // read and not yet checked, by index

  std::span<const int32_t> TokensOf(const cache::KvCacheSpec& spec, int64_t page) const {
    return std::span(tokens).subspan(static_cast<size_t>(page * spec.page_size), static_cast<size_t>(spec.page_size));
  }
  // Pages of the longest hit with the records of which has(index) is true.
  template <class Has>
  static int64_t Hit(const cache::KvCacheSpec& spec, int64_t pages, Has has) {
    return cache::LongestHit(spec, pages, [&](int64_t page, int group, cache::PageKind kind) {
      return has(cache::RecordIndex(spec, page, group, kind));
    });
  }

  // Guarded by the mutex.
  LoadState state = LoadState::kLookup;
  bool cancelled = false;
  std::deque<LoadedPage> ready;
  int64_t ready_bytes = 0;
  int64_t added_tokens = 0;  // by which the hit is longer
};

}  // namespace kvanta::store
