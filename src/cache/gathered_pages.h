// Pages of tokens that a query chose, each of tokens of one kind of record: exact first ones, quantized ones, exact
// last ones (docs/adr/0088). Shared by host and device.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "cache/visibility.h"

namespace kvanta::cache {

struct GatheredPages {
  int32_t page_size = 0;
  int32_t tokens[3] = {};  // of each of the three
  int32_t ends[3] = {};    // page after their last one

  // Pages of `count` positions, ascending, of a query in page `own_page`.
  KVANTA_HD static constexpr GatheredPages Of(const ExactPageRule& exact_pages, int32_t page_size, int32_t own_page,
                                              const int32_t* positions, int32_t count) noexcept {
    const PageRange<int32_t> quantized = exact_pages.Quantized(own_page);
    const auto before = [&](int32_t page) {  // positions in pages before it
      int32_t first = 0, last = count;
      while (first < last) {
        const int32_t middle = first + (last - first) / 2;
        if (positions[middle] / page_size < page) {
          first = middle + 1;
        } else {
          last = middle;
        }
      }
      return first;
    };
    const bool is_empty = quantized.first >= quantized.end;
    const int32_t first = is_empty ? count : before(quantized.first);
    const int32_t last = is_empty ? count : before(quantized.end);
    GatheredPages pages{.page_size = page_size, .tokens = {first, last - first, count - last}};
    int32_t end = 0;
    for (int kind = 0; kind < 3; ++kind) pages.ends[kind] = end += (pages.tokens[kind] + page_size - 1) / page_size;
    return pages;
  }

  KVANTA_HD constexpr int32_t Pages() const noexcept { return ends[2]; }
  KVANTA_HD constexpr int32_t KindOf(int32_t page) const noexcept {
    return page < ends[0] ? 0 : page < ends[1] ? 1 : 2;
  }
  KVANTA_HD constexpr bool IsExact(int32_t page) const noexcept { return KindOf(page) != 1; }
  // Index of a page among those of its kind of record.
  KVANTA_HD constexpr int32_t RecordOf(int32_t page) const noexcept {
    const int32_t kind = KindOf(page);
    return kind == 0 ? page : kind == 1 ? page - ends[0] : page - ends[1] + ends[0];
  }
  // Index among the positions of a page's first token.
  KVANTA_HD constexpr int32_t FirstOf(int32_t page) const noexcept {
    const int32_t kind = KindOf(page);
    const int32_t tokens_before = kind == 0 ? 0 : kind == 1 ? tokens[0] : tokens[0] + tokens[1];
    return tokens_before + (page - (kind == 0 ? 0 : ends[kind - 1])) * page_size;
  }
  // Tokens of a page; 0 after the last page.
  KVANTA_HD constexpr int32_t TokensOf(int32_t page) const noexcept {
    const int32_t kind = KindOf(page);
    const int32_t left = tokens[kind] - (page - (kind == 0 ? 0 : ends[kind - 1])) * page_size;
    return left < 0 ? 0 : left < page_size ? left : page_size;
  }
};

}  // namespace kvanta::cache
