// 16 lanes in four NEON registers; with bf16 dots where the unit's CPUs have them.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/compiler_vec16.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_exp.h"

namespace kvanta::kernels {
namespace {

struct Vec16 : CompilerVec16 {
  static KVANTA_INLINE F Fma(F a, F b, F c) {
    return Each(
        [](F4 x, F4 y, F4 z) __attribute__((always_inline)) { return (F4)vfmaq_f32(z, x, y); }, a, b, c);
  }
  static KVANTA_INLINE F Sqrt(F a) {
    return Each(
        [](F4 x) __attribute__((always_inline)) { return (F4)vsqrtq_f32(x); }, a);
  }
  // Rounds to the nearest integer, ties to even.
  static KVANTA_INLINE F Round(F a) {
    return Each(
        [](F4 x) __attribute__((always_inline)) { return (F4)vrndnq_f32(x); }, a);
  }
  static KVANTA_INLINE I RoundToInt(F a) {
    return Each(
        [](F4 x) __attribute__((always_inline)) { return (I4)vcvtnq_s32_f32(x); }, a);
  }
  static KVANTA_INLINE F Exp(F x) { return ExpOf<Vec16>(x); }

  static KVANTA_INLINE F LoadFp16(const uint16_t* p) {
    const U8 low = LoadVector<U8>(p), high = LoadVector<U8>(p + 8);
    return {{FromLowFp16(low), FromHighFp16(low), FromLowFp16(high), FromHighFp16(high)}};
  }
  // 16 + 16 codes of e4m3, times 2^-8: as fp16 with the exponent field unshifted.
  static KVANTA_INLINE void LoadE4M3Pair(const uint8_t* p, F& a, F& b) {
    a = FromE4M3(LoadVector<B16>(p));
    b = FromE4M3(LoadVector<B16>(p + 16));
  }
  // Elements of a table of 16, by the low and the high halves of 16 bytes: the four bytes of an element are looked up
  // apart.
  static KVANTA_INLINE void LookupNibbles(const uint8_t* p, F table, F& low, F& high) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint8x16x4_t columns = ByteColumns(table);
    low = LookUpFloats(columns, vandq_u8(bytes, vdupq_n_u8(15)));
    high = LookUpFloats(columns, vshrq_n_u8(bytes, 4));
  }

  static KVANTA_INLINE F4 FromLowFp16(U8 x) { return (F4)vcvt_f32_f16(vget_low_f16((float16x8_t)x)); }
  static KVANTA_INLINE F4 FromHighFp16(U8 x) { return (F4)vcvt_high_f32_f16((float16x8_t)x); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  // A step of a panel is [16 columns][2 k] codes, the pairs that bfdot multiplies: one phase.
  using Bf16X = uint32_t;
  struct Bf16W {
    bfloat16x8_t v[4];
  };
  static constexpr int kBf16Phases = 1;
  template <int kPhase>
  static KVANTA_INLINE Bf16W LoadBf16Block(const uint16_t* block) {
    const auto load = [&](int i) __attribute__((always_inline)) {
      return (bfloat16x8_t)vld1q_u16(block + 8 * i);
    };
    return {{ load(0), load(1), load(2), load(3) }};
  }
  static KVANTA_INLINE bfloat16x8_t BroadcastBf16(const Bf16X* x) {
    return (bfloat16x8_t)vdupq_n_u32(*x);
  }
  static KVANTA_INLINE F DotBf16(bfloat16x8_t x, Bf16W w, F sum) {
    return {
        {(F4)vbfdotq_f32(sum.v[0], w.v[0], x),
         (F4)vbfdotq_f32(sum.v[1], w.v[1], x),
         (F4)vbfdotq_f32(sum.v[2], w.v[2], x),
         (F4)vbfdotq_f32(sum.v[3], w.v[3], x) }};
  }
#else
  static KVANTA_INLINE F DotBf16(F x, Bf16W w, F sum) {
    return Fma(x, w, sum);
  }
#endif

  // Register tile of matrix kernels: 6 x 1 takes 24 of the 32 registers for sums, four for a column of weights, one for
  // the broadcast.
  static constexpr int kTileSums = 6;
  static constexpr int kRowTile = kSmallTiles ? 3 : 6;
  static constexpr int kColumnTile = kSmallTiles ? 2 : 4;

 private:
  static KVANTA_INLINE F FromE4M3(B16 codes) {
    const auto decode = [](uint16x8_t x) __attribute__((always_inline)) {
      return (U8)vorrq_u16(vandq_u16(vshlq_n_u16(x, 7), vdupq_n_u16(0x3f80)), vshlq_n_u16(vshrq_n_u16(x, 7), 15));
    };
    const U8 low = decode(vmovl_u8(vget_low_u8((uint8x16_t)codes))), high = decode(vmovl_high_u8((uint8x16_t)codes));
    return {{FromLowFp16(low), FromHighFp16(low), FromLowFp16(high), FromHighFp16(high)}};
  }
  // Byte i of each of the 16 elements.
  static KVANTA_INLINE uint8x16x4_t ByteColumns(F table) {
    float elements[16];
    Store(elements, table);
    return vld4q_u8(reinterpret_cast<const uint8_t*>(elements));
  }
  static KVANTA_INLINE F LookUpFloats(const uint8x16x4_t& columns, uint8x16_t index) {
    const uint8x16x4_t bytes = {{vqtbl1q_u8(columns.val[0], index), vqtbl1q_u8(columns.val[1], index),
                                 vqtbl1q_u8(columns.val[2], index), vqtbl1q_u8(columns.val[3], index)}};
    const uint8x16_t low01 = vzip1q_u8(bytes.val[0], bytes.val[1]), high01 = vzip2q_u8(bytes.val[0], bytes.val[1]);
    const uint8x16_t low23 = vzip1q_u8(bytes.val[2], bytes.val[3]), high23 = vzip2q_u8(bytes.val[2], bytes.val[3]);
    return {{(F4)vzip1q_u16((uint16x8_t)low01, (uint16x8_t)low23), (F4)vzip2q_u16((uint16x8_t)low01, (uint16x8_t)low23),
             (F4)vzip1q_u16((uint16x8_t)high01, (uint16x8_t)high23),
             (F4)vzip2q_u16((uint16x8_t)high01, (uint16x8_t)high23)}};
  }
};

}  // namespace
}  // namespace kvanta::kernels
