// A cache of small pages in one group, and token ids, for tests of the prefix cache.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/prefix_cache.h"

namespace kvanta::cache {

inline constexpr int kPageSize = 16;
inline constexpr int64_t kPageBytes = 1024, kExactBytes = 2048;

inline formats::CacheLayout SmallPages() {
  formats::CacheLayout layout;
  layout.page_size = kPageSize;
  layout.page_bytes = kPageBytes;
  layout.exact_page_bytes = kExactBytes;
  layout.groups = {{kPageBytes, kExactBytes}};
  layout.layers.emplace_back();
  return layout;
}

inline std::vector<int32_t> PageTokens(int count, int salt = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(i * 7 + salt);
  return tokens;
}

}  // namespace kvanta::cache
