// Exact dots of the four bytes of each lane, by the instructions that the unit's CPUs have: sdot and udot (dotprod),
// usdot (i8mm), else widening products.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vectors_portable.h"

namespace kvanta::kernels {
namespace {

// Adds the two 16-bit parts of each lane.
KVANTA_INLINE I4 AddPairs(I4 sum, int16x8_t pairs) {
  return (I4)vpadalq_s16((int32x4_t)sum, pairs);
}

// sum + four products of s8 a and s8 b.
KVANTA_INLINE I4 DotSigned(I4 sum, U4 a, U4 b) {
  const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
#if defined(__ARM_FEATURE_DOTPROD)
  return (I4)vdotq_s32((int32x4_t)sum, x, y);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)));
  return sum + (I4)vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(x, y)));
#endif
}

// The same where the sum of any two products fits 16 bits.
KVANTA_INLINE I4 DotSmall(I4 sum, U4 a, U4 b) {
#if defined(__ARM_FEATURE_DOTPROD)
  return DotSigned(sum, a, b);
#else
  const int8x16_t x = (int8x16_t)a, y = (int8x16_t)b;
  return AddPairs(sum, vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y)));
#endif
}

// sum + four products of u8 a and u8 b, where the sum of any two fits 15 bits.
KVANTA_INLINE I4 DotUnsigned(I4 sum, U4 a, U4 b) {
  const uint8x16_t x = (uint8x16_t)a, y = (uint8x16_t)b;
#if defined(__ARM_FEATURE_DOTPROD)
  return (I4)vdotq_u32((uint32x4_t)sum, x, y);
#else
  const uint16x8_t low = vmull_u8(vget_low_u8(x), vget_low_u8(y));
  return AddPairs(sum, (int16x8_t)vpaddq_u16(low, vmull_high_u8(x, y)));
#endif
}

// sum + four products of u8 a and s8 b. Without usdot a is read as a - 128, and b's own sum, which the compiler shares
// among the dots with the same b, makes up for it.
KVANTA_INLINE I4 DotMixed(I4 sum, U4 a, U4 b) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (I4)vusdotq_s32((int32x4_t)sum, (uint8x16_t)a, (int8x16_t)b);
#else
  const I4 less = DotSigned(I4{}, b, Broadcast(0x80808080U));
  return DotSigned(sum, a ^ 0x80808080U, b) - less;
#endif
}

}  // namespace
}  // namespace kvanta::kernels
