// Dots of blocks of 32 k with 16 columns, as x86/blocks_avx2.h describes them: compiler vectors.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_portable.h"
#include "kernels/linear/cpu/activation_codes.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kBlockRowTile = 2;

struct Int4Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) dots[row] = Vec16::I{};
    for (int pair = 0; pair < 4; ++pair) {  // of quads, in the low and high halves of the bytes
      const Vec16::U packed = LoadVectors<U4, 4>(w + pair * 64);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const Vec16::U codes = Each(
            [&](U4 b) __attribute__((always_inline)) { return (b >> (half * 4)) & 0x0f0f0f0fU; }, packed);
#pragma GCC unroll 2
        for (int row = 0; row < kRows; ++row) {
          dots[row] = AddBytes<false>(dots[row], codes, SignedBytes(x + row * stride + pair * 8 + half * 4));
        }
      }
    }
  }
};

struct Int8Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) dots[row] = Vec16::I{};
    for (int quad = 0; quad < 8; ++quad) {
      const Vec16::U codes = LoadVectors<U4, 4>(w + quad * 64);
#pragma GCC unroll 2
      for (int row = 0; row < kRows; ++row) {
        dots[row] = AddBytes<false>(dots[row], codes, SignedBytes(x + row * stride + quad * 4));
      }
    }
  }
};

using Int8WideDot = TwoTermDot<Int8Dot>;

}  // namespace
}  // namespace kvanta::kernels
