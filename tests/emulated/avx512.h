// AVX-512 by SIMDe: replaces <immintrin.h> in the unit under test, so that it runs on any CPU.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wshadow"
#endif
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#include <cstdint>
#include <cstring>

// Intrinsics missing in SIMDe 0.7.4, lane by lane by Intel's definition.
using __mmask16 = simde__mmask16;
using __mmask32 = simde__mmask32;
using __mmask64 = simde__mmask64;
#ifndef _MM_FROUND_NO_EXC
#define _MM_FROUND_NO_EXC SIMDE_MM_FROUND_NO_EXC
#endif

namespace {

inline __m512 EmulatedMaskzLoadPs(__mmask16 mask, const void* p) {
  float lanes[16] = {};
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) std::memcpy(&lanes[i], static_cast<const float*>(p) + i, sizeof(float));
  }
  return _mm512_loadu_ps(lanes);
}

inline void EmulatedMaskStorePs(void* p, __mmask16 mask, __m512 v) {
  float lanes[16];
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) std::memcpy(static_cast<float*>(p) + i, &lanes[i], sizeof(float));
  }
}

inline __m512i EmulatedCvtPsEpi32(__m512 v) {
  float lanes[16];
  int32_t out[16];
  _mm512_storeu_ps(lanes, v);
  for (int i = 0; i < 16; ++i) {
    const float rounded = __builtin_nearbyintf(lanes[i]);
    out[i] = rounded >= -0x1p31F && rounded < 0x1p31F ? static_cast<int32_t>(rounded) : INT32_MIN;
  }
  return _mm512_loadu_si512(out);
}

inline __m512 EmulatedCvtEpi32Ps(__m512i v) {
  int32_t lanes[16];
  float out[16];
  _mm512_storeu_si512(lanes, v);
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(lanes[i]);
  return _mm512_loadu_ps(out);
}

inline __m512 EmulatedCvtPhPs(__m256i v) {
  uint16_t codes[16];
  float out[16];
  simde_mm256_storeu_si256(reinterpret_cast<simde__m256i*>(codes), v);
  for (int i = 0; i < 16; ++i) out[i] = simde_float16_to_float32(simde_uint16_as_float16(codes[i]));
  return _mm512_loadu_ps(out);
}

inline __m512i EmulatedCvtEpu16Epi32(__m256i v) {
  uint16_t codes[16];
  int32_t out[16];
  simde_mm256_storeu_si256(reinterpret_cast<simde__m256i*>(codes), v);
  for (int i = 0; i < 16; ++i) out[i] = codes[i];
  return _mm512_loadu_si512(out);
}

inline __m512 EmulatedScalefPs(__m512 a, __m512 b) {
  float value[16];
  float exponent[16];
  _mm512_storeu_ps(value, a);
  _mm512_storeu_ps(exponent, b);
  for (int i = 0; i < 16; ++i) {
    value[i] = exponent[i] == exponent[i] ? __builtin_ldexpf(value[i], static_cast<int>(exponent[i])) : exponent[i];
  }
  return _mm512_loadu_ps(value);
}

}  // namespace

#undef _mm512_scalef_ps
#define _mm512_scalef_ps(a, b) EmulatedScalefPs(a, b)
#define _mm512_maskz_loadu_ps(mask, p) EmulatedMaskzLoadPs(mask, p)
#define _mm512_mask_storeu_ps(p, mask, v) EmulatedMaskStorePs(p, mask, v)
#define _mm512_cvtps_epi32(v) EmulatedCvtPsEpi32(v)
#define _mm512_cvtepi32_ps(v) EmulatedCvtEpi32Ps(v)
#define _mm512_cvtph_ps(v) EmulatedCvtPhPs(v)
#define _mm512_cvtepu16_epi32(v) EmulatedCvtEpu16Epi32(v)

#include "emulated/avx512_codes.h"
