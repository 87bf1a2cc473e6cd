// How the dots of blocks (linear_blocks_<isa>.h) keep 32 codes of x.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

struct ByteCodes {
  using X = int8_t[32];

  static KVANTA_INLINE void Store(const int32_t* codes, X& out) {
    for (int i = 0; i < 32; ++i) out[i] = static_cast<int8_t>(codes[i]);
  }
};

}  // namespace
}  // namespace kvanta::kernels
