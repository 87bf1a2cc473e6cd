// Dots of blocks of 32 k with 16 columns: AVX2. Exact in int32.
//
// Dot<kRows>(w, x, stride, dots) computes on every unit: lane c of dots[row] = sum over the block's k of code(c, k) *
// x(row, k). w: the block's codes of 16 columns (in the order of block_weight.h), unsigned; x: codes stored by Store(),
// 32 per row, of magnitude up to 127 unless the type says more, rows `stride` bytes apart.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/bytes_256.h"
#include "kernels/cpu/x86/vec16_avx2.h"
#include "kernels/linear/cpu/activation_codes.h"

namespace kvanta::kernels {
namespace {

// Four sums of 16 columns, two halves of weights, the broadcast and a mask.
inline constexpr int kBlockRowTile = kSmallTiles ? 2 : 4;

// Products of unsigned and signed bytes. A lane's sum of 16 products is at most 15 * 128 * 16 < 2^15, so a whole block
// is added in 16 bits.
struct Int4Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i lo[kRows], hi[kRows];
#pragma GCC unroll 8
    for (int pair = 0; pair < 4; ++pair) {
      const __m256i packed_lo = Load256(w + pair * 64), packed_hi = Load256(w + pair * 64 + 32);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i w_lo = _mm256_and_si256(half == 0 ? packed_lo : _mm256_srli_epi16(packed_lo, 4), mask);
        const __m256i w_hi = _mm256_and_si256(half == 0 ? packed_hi : _mm256_srli_epi16(packed_hi, 4), mask);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m256i codes = BroadcastQuad(x + row * stride + pair * 8 + half * 4);
          const __m256i products_lo = _mm256_maddubs_epi16(w_lo, codes);
          const __m256i products_hi = _mm256_maddubs_epi16(w_hi, codes);
          lo[row] = InOrder(pair + half == 0 ? products_lo : _mm256_add_epi16(lo[row], products_lo));
          hi[row] = InOrder(pair + half == 0 ? products_hi : _mm256_add_epi16(hi[row], products_hi));
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      dots[row] = {_mm256_madd_epi16(lo[row], ones), _mm256_madd_epi16(hi[row], ones)};
    }
  }
};

// Products of bytes do not fit the 16-bit sums of vpmaddubsw: the even and the odd codes of a quad are widened to 16
// bits, in the order (0, 2), (1, 3). So x may have 16 bits: up to 32,512.
struct Int8Dot {
  using X = int16_t[32];

  static KVANTA_INLINE void Store(const int32_t* codes, X& out) {
    for (int i = 0; i < 32; i += 4) {
      out[i] = static_cast<int16_t>(codes[i]);
      out[i + 1] = static_cast<int16_t>(codes[i + 2]);
      out[i + 2] = static_cast<int16_t>(codes[i + 1]);
      out[i + 3] = static_cast<int16_t>(codes[i + 3]);
    }
  }

  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const __m256i even = _mm256_set1_epi16(255);
    __m256i lo[kRows], hi[kRows];
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) {
      const __m256i bytes_lo = Load256(w + quad * 64), bytes_hi = Load256(w + quad * 64 + 32);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i w_lo = half == 0 ? _mm256_and_si256(bytes_lo, even) : _mm256_srli_epi16(bytes_lo, 8);
        const __m256i w_hi = half == 0 ? _mm256_and_si256(bytes_hi, even) : _mm256_srli_epi16(bytes_hi, 8);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m256i codes = BroadcastQuad(x + row * stride + quad * 8 + half * 4);
          const __m256i products_lo = _mm256_madd_epi16(w_lo, codes), products_hi = _mm256_madd_epi16(w_hi, codes);
          lo[row] = InOrder(quad + half == 0 ? products_lo : _mm256_add_epi32(lo[row], products_lo));
          hi[row] = InOrder(quad + half == 0 ? products_hi : _mm256_add_epi32(hi[row], products_hi));
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) dots[row] = {lo[row], hi[row]};
  }
};

using Int8WideDot = Int8Dot;

}  // namespace
}  // namespace kvanta::kernels
