// Prefetches what a later kernel call will read.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kLineBytes = 64;
// Locality argument of __builtin_prefetch: 3 for the first-level cache, 2 for the second-level one.
#ifdef KVANTA_PREFETCH_LEVEL2
inline constexpr int kPrefetchLocality = 2;
#else
inline constexpr int kPrefetchLocality = 3;
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
    __builtin_prefetch(next_, 0, kPrefetchLocality);
    __builtin_prefetch(next_ + second_, 0, kPrefetchLocality);
    next_ += bytes;
  }

  const uint8_t* next_ = nullptr;
  int64_t second_ = 0;
  uint32_t bytes_of_step_ = 0;
};

}  // namespace
}  // namespace kvanta::kernels
