// Fp16x32 (src/kernels/cpu/x86/fp16x32.h) lane by lane, for CPUs without AVX-512 FP16. Included after AVX-512's
// intrinsics or those of SIMDe.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace kvanta::kernels {
namespace {

struct Fp16x32 {
  static __m512i Add(__m512i a, __m512i b) { return Fma(a, _mm512_set1_epi16(0x3c00), b); }
  // Products are exact in double precision, and sums nearly; rounded to f32, then to fp16.
  static __m512i Fma(__m512i a, __m512i b, __m512i c) {
    uint16_t x[32], y[32], z[32];
    _mm512_storeu_si512(x, a);
    _mm512_storeu_si512(y, b);
    _mm512_storeu_si512(z, c);
    for (int i = 0; i < 32; ++i) {
      const double sum = double{Fp16ToFloat(x[i])} * Fp16ToFloat(y[i]) + Fp16ToFloat(z[i]);
      z[i] = FloatToFp16(static_cast<float>(sum));
    }
    return _mm512_loadu_si512(z);
  }
};

}  // namespace
}  // namespace kvanta::kernels
