// 32 lanes of fp16 in one zmm register: AVX-512 FP16. Included after vec16_avx512.h. Instructions are inline assembly:
// GCC before 12 has no intrinsics for them.
#pragma once

#ifndef KVANTA_EMULATE_FP16  // the tests replace it by plain loops, to run its unit on any CPU
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

struct Fp16x32 {
  static KVANTA_INLINE __m512i Add(__m512i a, __m512i b) {
    __m512i sum;
    __asm__("vaddph %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
  }
  // a * b + c, rounded once.
  static KVANTA_INLINE __m512i Fma(__m512i a, __m512i b, __m512i c) {
    __asm__("vfmadd231ph %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
  }
};

}  // namespace
}  // namespace kvanta::kernels
#endif
