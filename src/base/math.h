// Integer arithmetic of sizes, for host and device. Always inlined, so that ISA units may use it: a copy compiled for
// one instruction set must not be shared with other units.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace kvanta {

// ceil(a / b) for a >= 0, b > 0.
KVANTA_HD __attribute__((always_inline)) constexpr int64_t CeilDiv(int64_t a, int64_t b) noexcept {
  return (a + b - 1) / b;
}

// The smallest multiple of `unit` that is not below `value`.
KVANTA_HD __attribute__((always_inline)) constexpr int64_t RoundUp(int64_t value, int64_t unit) noexcept {
  return CeilDiv(value, unit) * unit;
}

}  // namespace kvanta
