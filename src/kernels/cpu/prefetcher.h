// Touches, line by line, what a later kernel call will read.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kLineBytes = 64;

// Spreads lines evenly over the calls of Step() that a kernel makes. Several at once would fill what a core has to wait
// with for memory, and then it computes nothing. Where there are more steps than lines, some touch a line again.
class Prefetcher {
 public:
  // `steps`: about as many as there will be.
  KVANTA_INLINE Prefetcher(const Prefetch& ahead, int steps) {
    const uint32_t bytes = static_cast<uint32_t>(ahead.end - ahead.next);
    if (bytes == 0 || steps <= 0) return;
    next_ = ahead.next;
    second_ = ahead.second;
    const uint32_t limit = static_cast<uint32_t>(steps) * kLineBytes;
    for (uint32_t more = bytes; more > limit; more -= kLineBytes) Touch(kLineBytes);
    bytes_of_step_ =
        bytes >= limit ? kLineBytes : (bytes + static_cast<uint32_t>(steps) - 1) / static_cast<uint32_t>(steps);
  }

  KVANTA_INLINE void Step() { Steps<1>(); }
  // Some steps by one branch, which in a loop of few instructions costs.
  template <int kCount>
  KVANTA_INLINE void Steps() {
    if (bytes_of_step_ == 0) return;
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) Touch(bytes_of_step_);
  }

 private:
  KVANTA_INLINE void Touch(uint32_t bytes) {
    __builtin_prefetch(next_);
    __builtin_prefetch(next_ + second_);
    next_ += bytes;
  }

  const uint8_t* next_ = nullptr;
  int64_t second_ = 0;
  uint32_t bytes_of_step_ = 0;
};

}  // namespace
}  // namespace kvanta::kernels
