// Dots of blocks of 32 k with 16 columns, as blocks_avx2.h describes them: AVX-512 VNNI.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#include "kernels/linear/cpu/activation_codes.h"

namespace kvanta::kernels {
namespace {

// Sums in int32 and as many in f32, and the weights.
inline constexpr int kBlockRowTile = kSmallTiles ? 2 : Vec16::kRowTile;

struct Int4Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const __m512i mask = _mm512_set1_epi32(0x0f0f0f0f);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) dots[row] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int pair = 0; pair < 4; ++pair) {
      const __m512i packed = _mm512_loadu_si512(w + pair * 64);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m512i codes = _mm512_and_si512(half == 0 ? packed : _mm512_srli_epi32(packed, 4), mask);
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) {
          dots[row] = _mm512_dpbusd_epi32(dots[row], codes, Broadcast32(x + row * stride + pair * 8 + half * 4));
        }
      }
    }
  }
};

struct Int8Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) dots[row] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m512i codes = _mm512_loadu_si512(w + quad * 64);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) {
        dots[row] = _mm512_dpbusd_epi32(dots[row], codes, Broadcast32(x + row * stride + quad * 4));
      }
    }
  }
};

using Int8WideDot = TwoTermDot<Int8Dot>;

}  // namespace
}  // namespace kvanta::kernels
