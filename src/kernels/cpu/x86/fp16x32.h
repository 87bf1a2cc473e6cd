// 32 lanes of fp16 in one zmm register: AVX-512 FP16.
#pragma once

#ifndef KVANTA_EMULATE_FP16  // the tests replace it by plain loops, to run its unit on any CPU
#include <immintrin.h>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

struct Fp16x32 {
  using H = __m512h;

  static KVANTA_INLINE H Zero() { return _mm512_setzero_ph(); }
  static KVANTA_INLINE H FromBits(__m512i bits) { return _mm512_castsi512_ph(bits); }
  static KVANTA_INLINE __m512i Bits(H a) { return _mm512_castph_si512(a); }
  static KVANTA_INLINE H Add(H a, H b) { return _mm512_add_ph(a, b); }
  static KVANTA_INLINE H Fma(H a, H b, H c) { return _mm512_fmadd_ph(a, b, c); }
};

}  // namespace
}  // namespace kvanta::kernels
#endif
