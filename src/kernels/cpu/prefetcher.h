// Touches, some cache lines per step, what a later kernel call will read.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

struct Prefetcher : Prefetch {
  // Two lines: for every second line of 64 bytes that a kernel reads.
  KVANTA_INLINE void Step() {
    if (next < end) {
      __builtin_prefetch(next);
      __builtin_prefetch(next + second);
      next += 64;
    }
  }
  KVANTA_INLINE void Lines(int count) {
    for (int i = 0; i < count; i += 2) Step();
  }
  KVANTA_INLINE void Rest() {
    while (next < end) Step();
  }
};

}  // namespace
}  // namespace kvanta::kernels
