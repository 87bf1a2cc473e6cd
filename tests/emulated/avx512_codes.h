// Intrinsics of the KV cache's decoders (codes_avx512.h, trellis_avx512.h) that are missing or wrong in SIMDe 0.7.4,
// lane by lane by Intel's definition. Included by avx512.h.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>

#include "base/dtype.h"

namespace {

inline __m512i EmulatedMaskzLoadEpi32(uint32_t mask, const void* p) {
  int32_t lanes[16] = {};
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) std::memcpy(&lanes[i], static_cast<const char*>(p) + 4 * i, sizeof(int32_t));
  }
  return _mm512_loadu_si512(lanes);
}

inline __m512i EmulatedSraiEpi32(__m512i v, int count) {
  int32_t lanes[16];
  _mm512_storeu_si512(lanes, v);
  for (int32_t& lane : lanes) lane >>= count;
  return _mm512_loadu_si512(lanes);
}

// Mask of the lanes for which compare() is true.
template <class Lane, class Compare>
inline uint32_t EmulatedCompare(__m512i a, __m512i b, Compare compare) {
  constexpr int kLanes = 64 / sizeof(Lane);
  Lane x[kLanes];
  Lane y[kLanes];
  _mm512_storeu_si512(x, a);
  _mm512_storeu_si512(y, b);
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(compare(x[i], y[i])) << i;
  return mask;
}

inline __m256i EmulatedCvtEpi32Epi16(__m512i v) {
  uint32_t lanes[16];
  uint16_t out[16];
  _mm512_storeu_si512(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint16_t>(lanes[i]);
  return simde_mm256_loadu_si256(reinterpret_cast<const simde__m256i*>(out));
}

inline __m128i EmulatedCvtEpi32Epi8(__m512i v) {
  uint32_t lanes[16];
  uint8_t out[16];
  _mm512_storeu_si512(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(lanes[i]);
  return simde_mm_loadu_si128(reinterpret_cast<const simde__m128i*>(out));
}

// Unsigned saturation.
inline __m128i EmulatedCvtusEpi32Epi8(__m512i v) {
  uint32_t lanes[16];
  uint8_t out[16];
  _mm512_storeu_si512(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<uint8_t>(lanes[i] < 255 ? lanes[i] : 255);
  return simde_mm_loadu_si128(reinterpret_cast<const simde__m128i*>(out));
}

inline int32_t EmulatedReduceAddEpi32(__m512i v) {
  uint32_t lanes[16];
  _mm512_storeu_si512(lanes, v);
  uint32_t sum = 0;
  for (const uint32_t lane : lanes) sum += lane;
  return static_cast<int32_t>(sum);
}

inline __m512 EmulatedPermutePs(__m512 v, int order) {
  float lanes[16];
  float out[16];
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = lanes[i / 4 * 4 + (order >> (2 * (i % 4)) & 3)];
  return _mm512_loadu_ps(out);
}

// GCC 12 at -O1 gives wrong codes if this, or SIMDe's own, is inlined into two lines of trellis keys.
[[maybe_unused, gnu::noinline]] __m512i EmulatedMaskShuffleEpi8(__m512i src, uint64_t mask, __m512i v, __m512i order) {
  uint8_t out[64];
  uint8_t lanes[64];
  uint8_t from[64];
  _mm512_storeu_si512(out, src);
  _mm512_storeu_si512(lanes, v);
  _mm512_storeu_si512(from, order);
  for (int i = 0; i < 64; ++i) {
    if ((mask >> i & 1) != 0) out[i] = (from[i] & 0x80) != 0 ? 0 : lanes[i / 16 * 16 + (from[i] & 15)];
  }
  return _mm512_loadu_si512(out);
}

// SIMDe 0.7.4 shifts by 64 bits for a control of 0, which is undefined and differs between builds.
inline __m512i EmulatedMultishiftEpi64Epi8(__m512i control, __m512i v) {
  uint8_t controls[64];
  uint64_t words[8];
  uint8_t out[64];
  _mm512_storeu_si512(controls, control);
  _mm512_storeu_si512(words, v);
  for (int i = 0; i < 64; ++i) out[i] = static_cast<uint8_t>(std::rotr(words[i / 8], controls[i] & 63));
  return _mm512_loadu_si512(out);
}

// Rounds to nearest even, whatever `rounding` is.
inline __m256i EmulatedCvtPsPh(__m512 v, int /*rounding*/) {
  float lanes[16];
  uint16_t out[16];
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = kvanta::FloatToFp16(lanes[i]);
  return simde_mm256_loadu_si256(reinterpret_cast<const simde__m256i*>(out));
}

}  // namespace

#define _mm512_maskz_loadu_epi32(mask, p) EmulatedMaskzLoadEpi32(mask, p)
#define _mm512_srai_epi32(v, count) EmulatedSraiEpi32(v, count)
#define _mm512_cmplt_epi32_mask(a, b) static_cast<uint16_t>(EmulatedCompare<int32_t>(a, b, std::less<>()))
#define _mm512_cmpeq_epi16_mask(a, b) EmulatedCompare<int16_t>(a, b, std::equal_to<>())
#define _mm512_cvtepi32_epi16(v) EmulatedCvtEpi32Epi16(v)
#define _mm512_cvtepi32_epi8(v) EmulatedCvtEpi32Epi8(v)
#define _mm512_cvtusepi32_epi8(v) EmulatedCvtusEpi32Epi8(v)
#define _mm512_reduce_add_epi32(v) EmulatedReduceAddEpi32(v)
#undef _mm512_mask_shuffle_epi8
#define _mm512_mask_shuffle_epi8(src, mask, v, order) EmulatedMaskShuffleEpi8(src, mask, v, order)
#undef _mm512_multishift_epi64_epi8
#define _mm512_multishift_epi64_epi8(control, v) EmulatedMultishiftEpi64Epi8(control, v)
#define _mm512_cvtps_ph(v, rounding) EmulatedCvtPsPh(v, rounding)
#define _mm512_permute_ps(v, order) EmulatedPermutePs(v, order)
