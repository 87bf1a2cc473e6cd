// Touches, one cache line per step, what the next kernel call will read.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

struct Prefetcher {
  const uint8_t* next;
  const uint8_t* end;

  KVANTA_INLINE void Step() {
    if (next < end) {
      __builtin_prefetch(next);
      next += 64;
    }
  }
  KVANTA_INLINE void Lines(int count) {
    for (int i = 0; i < count; ++i) Step();
  }
  KVANTA_INLINE void Rest() {
    while (next < end) Step();
  }
};

}  // namespace
}  // namespace kvanta::kernels
