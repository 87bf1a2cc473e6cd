// Prefetches what a later kernel call will read.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kLineBytes = 64;
// Target of a unit's prefetches, as measured (docs/adr/0069-pages-are-prefetched-into-both-caches.md).
enum class PrefetchInto : uint8_t {
  kLevel1,      // the page read next, into the first-level cache, which holds half of a page of 8 bits besides
  kLevel2,      // the page read after the next one, into the second-level cache
  kBothLevels,  // the page read next, into the first-level cache, and the one after it, into the second
};
#if defined(KVANTA_PREFETCH_LEVEL2)
inline constexpr PrefetchInto kPrefetchInto = PrefetchInto::kLevel2;
inline constexpr int64_t kTwoPartPrefetchBytes = 0;
#elif defined(KVANTA_PREFETCH_BOTH_LEVELS)
inline constexpr PrefetchInto kPrefetchInto = PrefetchInto::kBothLevels;
inline constexpr int64_t kTwoPartPrefetchBytes = 0;
#else
inline constexpr PrefetchInto kPrefetchInto = PrefetchInto::kLevel1;
inline constexpr int64_t kTwoPartPrefetchBytes = 20 << 10;
#endif

// Spreads cache-line prefetches evenly over the Step() calls of a kernel: many at once would fill the line-fill buffers
// and stall the computation. With more steps than lines, some lines are prefetched twice.
class Prefetcher {
 public:
  // steps: approximate number of Step() calls to come.
  KVANTA_INLINE Prefetcher(const Prefetch& ahead, int steps) {
    const uint32_t bytes = static_cast<uint32_t>(ahead.end - ahead.next);
    if (bytes == 0 || steps <= 0) return;
    next_ = ahead.next;
    second_ = ahead.second;
    if constexpr (kPrefetchInto == PrefetchInto::kLevel2) next_ += ahead.later;
    if constexpr (kPrefetchInto == PrefetchInto::kBothLevels) {
      later_ = ahead.later;
      later_second_ = ahead.later + ahead.second;
    }
    const uint32_t max_bytes = static_cast<uint32_t>(steps) * kLineBytes;
    for (uint32_t more = bytes; more > max_bytes; more -= kLineBytes) Touch(kLineBytes);
    bytes_of_step_ =
        bytes >= max_bytes ? kLineBytes : (bytes + static_cast<uint32_t>(steps) - 1) / static_cast<uint32_t>(steps);
  }

  KVANTA_INLINE void Step() { Steps<1>(); }
  // Several steps with one branch, which is expensive in a short loop.
  template <int kCount>
  KVANTA_INLINE void Steps() {
    if (bytes_of_step_ == 0) return;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) Touch(bytes_of_step_);
  }

 private:
  KVANTA_INLINE void Touch(uint32_t bytes) {
    constexpr int kLevel1 = 3, kLevel2 = 2;  // locality arguments
    constexpr int kNext = kPrefetchInto == PrefetchInto::kLevel2 ? kLevel2 : kLevel1;
    __builtin_prefetch(next_, 0, kNext);
    __builtin_prefetch(next_ + second_, 0, kNext);
    if constexpr (kPrefetchInto == PrefetchInto::kBothLevels) {
      __builtin_prefetch(next_ + later_, 0, kLevel2);
      __builtin_prefetch(next_ + later_second_, 0, kLevel2);
    }
    next_ += bytes;
  }

  const uint8_t* next_ = nullptr;
  int64_t second_ = 0;
  int64_t later_ = 0;  // offsets of what is read later
  int64_t later_second_ = 0;
  uint32_t bytes_of_step_ = 0;
};

}  // namespace
}  // namespace kvanta::kernels
