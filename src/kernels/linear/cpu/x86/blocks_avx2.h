// Dots of blocks of 32 k with 16 columns: AVX2. Exact in int32.
//
// BlockDots<kLayout, kIsWide>::AddDots<kRows, kSub>(w, x, stride, dots) computes on every unit: lane c of dots[row] +=
// sum over the k of sub-block kSub of code(c, k) * x(row, k). w: the block's codes of 16 columns (block_layout.h),
// unsigned; x: codes stored by Store(), 32 per row, of magnitude up to 127, or 32,512 if wide, rows `stride` bytes
// apart.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/bytes_256.h"
#include "kernels/cpu/x86/vec16_avx2.h"
#include "kernels/linear/cpu/activation_codes.h"
#include "kernels/linear/cpu/block_codes.h"

namespace kvanta::kernels {
namespace {

struct Bytes64 {
  struct V {
    __m256i lo, hi;
  };

  static KVANTA_INLINE V Load(const uint8_t* p) { return {Load256(p), Load256(p + 32)}; }
  static KVANTA_INLINE V And(V x, int mask) { return {Bytes256::And(x.lo, mask), Bytes256::And(x.hi, mask)}; }
  static KVANTA_INLINE V Or(V a, V b) { return {Bytes256::Or(a.lo, b.lo), Bytes256::Or(a.hi, b.hi)}; }
  static KVANTA_INLINE V Right(V x, int bits) { return {Bytes256::Right(x.lo, bits), Bytes256::Right(x.hi, bits)}; }
  static KVANTA_INLINE V Left(V x, int bits) { return {Bytes256::Left(x.lo, bits), Bytes256::Left(x.hi, bits)}; }
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    return {Bytes256::LookUp(x.lo, table), Bytes256::LookUp(x.hi, table)};
  }
};

// Products of unsigned and signed bytes, added in 16 bits as far as they fit: a quad adds two products of up to
// MaxCode() * 128.
template <BlockLayout kLayout>
struct ByteDots : ByteCodes {
  static constexpr int kQuads = 8 / kLayout.Subs();  // quads per dot
  static constexpr int kFit = 32767 / (256 * kLayout.MaxCode());
  static constexpr int kPart = kFit >= kQuads ? kQuads : kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  static_assert(kFit >= 1);
  // Four sums of 16 columns, two halves of weights, the broadcast and a mask; two where sums have two widths.
  static constexpr int kRowTile = kSmallTiles || kPart < kQuads ? 2 : 4;

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    AddPart<kRows, kSub * kQuads, (kSub + 1) * kQuads>(w, x, stride, dots);
  }

 private:
  template <int kRows, int kFirst, int kEnd>
  static KVANTA_INLINE void AddPart(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    __m256i lo[kRows], hi[kRows];
    AddQuads<kRows, kFirst, kFirst + kPart, true>(w, x, stride, lo, hi);
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      dots[row].lo = _mm256_add_epi32(dots[row].lo, _mm256_madd_epi16(lo[row], ones));
      dots[row].hi = _mm256_add_epi32(dots[row].hi, _mm256_madd_epi16(hi[row], ones));
    }
    if constexpr (kFirst + kPart < kEnd) AddPart<kRows, kFirst + kPart, kEnd>(w, x, stride, dots);
  }

  template <int kRows, int kQuad, int kEnd, bool kIsFirst>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, const uint8_t* x, int64_t stride, __m256i* lo, __m256i* hi) {
    const Bytes64::V codes = UnpackQuad<Bytes64, kLayout, kQuad>(w);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const __m256i quad = BroadcastQuad(x + row * stride + kQuad * 4);
      const __m256i products_lo = _mm256_maddubs_epi16(codes.lo, quad);
      const __m256i products_hi = _mm256_maddubs_epi16(codes.hi, quad);
      lo[row] = InOrder(kIsFirst ? products_lo : _mm256_add_epi16(lo[row], products_lo));
      hi[row] = InOrder(kIsFirst ? products_hi : _mm256_add_epi16(hi[row], products_hi));
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kQuad + 1, kEnd, false>(w, x, stride, lo, hi);
  }
};

// Products of bytes do not fit the 16-bit sums of vpmaddubsw: the even and the odd codes of a quad are widened to 16
// bits, in the order (0, 2), (1, 3). So x may have 16 bits: up to 32,512.
template <BlockLayout kLayout>
struct WordDots : PanelDots {
  using X = int16_t[32];
  static constexpr int kRowTile = kSmallTiles ? 2 : 4;
  static constexpr int kQuads = 8 / kLayout.Subs();

  static KVANTA_INLINE void Store(const int32_t* codes, X& out) {
    for (int i = 0; i < 32; i += 4) {
      out[i] = static_cast<int16_t>(codes[i]);
      out[i + 1] = static_cast<int16_t>(codes[i + 2]);
      out[i + 2] = static_cast<int16_t>(codes[i + 1]);
      out[i + 3] = static_cast<int16_t>(codes[i + 3]);
    }
  }

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    AddQuads<kRows, kSub * kQuads, (kSub + 1) * kQuads>(w, x, stride, dots);
  }

 private:
  template <int kRows, int kQuad, int kEnd>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const Bytes64::V codes = UnpackQuad<Bytes64, kLayout, kQuad>(w);
    const __m256i even = _mm256_set1_epi16(255);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i w_lo = half == 0 ? _mm256_and_si256(codes.lo, even) : _mm256_srli_epi16(codes.lo, 8);
      const __m256i w_hi = half == 0 ? _mm256_and_si256(codes.hi, even) : _mm256_srli_epi16(codes.hi, 8);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        const __m256i pair = BroadcastQuad(x + row * stride + kQuad * 8 + half * 4);
        dots[row].lo = InOrder(_mm256_add_epi32(dots[row].lo, _mm256_madd_epi16(w_lo, pair)));
        dots[row].hi = InOrder(_mm256_add_epi32(dots[row].hi, _mm256_madd_epi16(w_hi, pair)));
      }
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kQuad + 1, kEnd>(w, x, stride, dots);
  }
};

template <BlockLayout kLayout, bool kIsWide, bool kIsByte = (kLayout.MaxCode() < 128)>
struct DotsOf {
  using Type = typename WidthOf<ByteDots<kLayout>, kIsWide>::Type;
};
template <BlockLayout kLayout, bool kIsWide>
struct DotsOf<kLayout, kIsWide, false> {
  using Type = WordDots<kLayout>;
};
template <BlockLayout kLayout, bool kIsWide>
using BlockDots = typename DotsOf<kLayout, kIsWide>::Type;

}  // namespace
}  // namespace kvanta::kernels
