// Changes of the prefix cache in memory, for routers that send a prompt to where its pages are (docs/fleet.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvanta {

enum class KvEventKind : uint8_t {
  kStored,   // a page came into the cache
  kRemoved,  // it left the memory
  kCleared,  // the cache is empty
};

// A page of a KV cache group (EngineStats::groups), identified by a hash over all token ids from the first on, the
// model, the cache format and the salt.
struct KvEvent {
  KvEventKind kind = KvEventKind::kCleared;
  int group = 0;
  uint64_t block_hash = 0;
  // For stored pages alone:
  std::optional<uint64_t> parent_block_hash = {};  // page before it; none for the first page
  std::vector<int32_t> tokens = {};                // the page's own
  std::string cache_salt = {};                     // salt of the first page

  bool operator==(const KvEvent&) const = default;
};

}  // namespace kvanta
