// Dot products with fp8 codes by multiply-adds of fp16, which have twice the products of f32's. fp8 is exact in fp16.
// Queries and scaled probabilities are rounded to fp16, in units in which no sum overflows, and sums leave fp16 for f32
// after every kChainProducts products: both errors are small relative to those of fp8 codes. Included by
// isa_avx512fp16.cc.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// After AVX-512.
#include "kernels/cpu/x86/fp16x32.h"

namespace kvanta::kernels {
namespace {

// Products that a sum in fp16 has at most.
inline constexpr int kChainProducts = 32;

// Sums of the two lanes of fp16 of each word.
KVANTA_INLINE __m512 SumPairs(__m512i sums) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(Fp16x32::Add(sums, _mm512_rol_epi32(sums, 16))));
}

// seeeemmm -> s0eeeemmm0000000 is fp16 of 2^-8 times the value, subnormals included. The NaN code 0x7f becomes a
// number: NaNs are found apart.
struct Fp16OfE4M3 {
  static constexpr bool kHasNanCode = true;
  static constexpr float kCodeUnit = 256;
  static constexpr float kMaxOperand = 0x1p9f;  // times 2 kChainProducts times the largest code, 1.75: below 65504
  static KVANTA_INLINE __m512i Element(__m512i words, int pair) {
    const __m512i top = pair == 0 ? _mm512_slli_epi16(words, 8) : words;
    return _mm512_and_si512(_mm512_srai_epi16(top, 1), _mm512_set1_epi16(-0x4080));  // 0xbf80
  }
};
// seeeeemm is the upper byte of an fp16.
struct Fp16OfE5M2 {
  static constexpr bool kHasNanCode = false;
  static constexpr float kCodeUnit = 1;
  static constexpr float kMaxOperand = 0x1p-6f;  // the largest code is 57344
  static KVANTA_INLINE __m512i Element(__m512i words, int pair) {
    return pair == 0 ? _mm512_slli_epi16(words, 8) : _mm512_and_si512(words, _mm512_set1_epi16(-0x100));
  }
};
// Words that are pairs of fp16 already: fp8 codes expanded by Fp16DotCode::Expand().
template <class Decode>
struct ExpandedFp16 {
  static constexpr bool kHasNanCode = false;
  static constexpr float kCodeUnit = Decode::kCodeUnit;
  static constexpr float kMaxOperand = Decode::kMaxOperand;
  static KVANTA_INLINE __m512i Element(__m512i words, int /*pair*/) { return words; }
};

template <class Decode, int kPairs>
struct Fp16Dot {
  static constexpr int kManyRows = kSmallTiles ? 0 : 8;  // shares loads and decoding among as many rows as fit
  static constexpr int kSub = 2 * kPairs;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 2;
  static constexpr float kMaxOperand = Decode::kMaxOperand;
  static constexpr float kCodeUnit = Decode::kCodeUnit;
  static constexpr bool kPackedBySoftmax = true;

  // Stores the even ones of every four first, as the elements of words are paired.
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    const __m512 pairs = _mm512_permute_ps(x, _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(pairs, _MM_FROUND_TO_NEAREST_INT));
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    constexpr int kChainLines = kChainProducts / kPairs;
    __m512i largest[kUnroll];  // codes without their signs
    for (int v = 0; v < kUnroll; ++v) largest[v] = _mm512_setzero_si512();
    for (int64_t first = 0; first == 0 || first < lines.count; first += kChainLines) {
      const int64_t left = lines.count - first;
      const StridedLines chain{lines.first + first * lines.stride, lines.stride,
                               static_cast<int>(left < kChainLines ? left : kChainLines), lines.unroll_stride,
                               lines.left};
      __m512i sum[kRows * kUnroll];
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kUnroll; ++i) sum[i] = _mm512_setzero_si512();
      ForLines(
          chain, prefetch, [&](int64_t i) __attribute__((always_inline)) {
            __m512i words[kUnroll];
            for (int v = 0; v < kUnroll; ++v) {
              words[v] = LoadLine<kTail>(chain, i, v);
              if constexpr (Decode::kHasNanCode) {
                largest[v] = _mm512_max_epu8(largest[v], _mm512_add_epi8(words[v], words[v]));
              }
            }
#pragma GCC unroll 2
            for (int pair = 0; pair < kPairs; ++pair) {
              __m512i x[kUnroll];
              for (int v = 0; v < kUnroll; ++v) x[v] = Decode::Element(words[v], pair);
#pragma GCC unroll 8
              for (int r = 0; r < kRows; ++r) {
                const __m512i operand = Broadcast32(operands[r] + (first + i) * (kSub * kOperandBytes) + pair * 4);
                for (int v = 0; v < kUnroll; ++v) {
                  sum[r * kUnroll + v] = Fp16x32::Fma(x[v], operand, sum[r * kUnroll + v]);
                }
              }
            }
          });
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kUnroll; ++i) {
        const __m512 pairs = SumPairs(sum[i]);
        sums[i] = first == 0 ? pairs : _mm512_add_ps(sums[i], pairs);
      }
    }
    if constexpr (Decode::kHasNanCode) {
      for (int v = 0; v < kUnroll; ++v) {
        const __m512i nan = _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(largest[v], _mm512_set1_epi8(-2)));
        const __mmask16 lanes = _mm512_test_epi32_mask(nan, nan);
        for (int i = v; i < kRows * kUnroll; i += kUnroll) {
          sums[i] = _mm512_mask_blend_ps(lanes, sums[i], _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
        }
      }
    }
  }
};

// Decode: fp8.
template <class Decode>
struct Fp16DotCode : Fp16Dot<Decode, 2> {
  using Expanded = Fp16Dot<ExpandedFp16<Decode>, 1>;  // sums in the same order

  // Stores the pairs of `count` lines of 16 words: pair s of line i at out + s * stride + 64 i.
  static KVANTA_INLINE void Expand(const uint8_t* lines, int count, uint8_t* out, int64_t stride) {
    for (int i = 0; i < count; ++i, lines += 64, out += 64) {
      const __m512i words = _mm512_loadu_si512(lines);
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        __m512i x = Decode::Element(words, pair);
        if constexpr (Decode::kHasNanCode) {
          const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
          const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x3f80));
          x = _mm512_mask_blend_epi16(nan, x, _mm512_set1_epi16(0x7e00));
        }
        _mm512_store_si512(out + pair * stride, x);
      }
    }
  }
};

using Fp16DotE4M3 = Fp16DotCode<Fp16OfE4M3>;
using Fp16DotE5M2 = Fp16DotCode<Fp16OfE5M2>;

}  // namespace
}  // namespace kvanta::kernels
