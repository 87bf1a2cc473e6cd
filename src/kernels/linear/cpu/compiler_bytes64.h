// 64 bytes in compiler vectors, for block_codes.h: the portable and the NEON units' Bytes64 but for look-ups. Included
// by blocks_<isa>.h after the unit's Vec16.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vectors_portable.h"

namespace kvanta::kernels {
namespace {

// Shifts cross bytes: UnpackQuad() masks what they bring in.
struct CompilerBytes64 {
  using V = Vec16::U;

  static KVANTA_INLINE V Load(const uint8_t* p) { return LoadVectors<U4, 4>(p); }
  static KVANTA_INLINE V And(V x, int mask) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y & static_cast<uint32_t>(mask) * 0x01010101U; }, x);
  }
  static KVANTA_INLINE V Or(V a, V b) { return a | b; }
  static KVANTA_INLINE V Right(V x, int bits) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y >> static_cast<uint32_t>(bits); }, x);
  }
  static KVANTA_INLINE V Left(V x, int bits) {
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return y << static_cast<uint32_t>(bits); }, x);
  }
};

}  // namespace
}  // namespace kvanta::kernels
