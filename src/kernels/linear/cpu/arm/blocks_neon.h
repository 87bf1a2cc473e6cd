// Dots of blocks of 32 k with 16 columns, as x86/blocks_avx2.h describes them: NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/arm/dot_bytes.h"
#include "kernels/cpu/arm/vec16_neon.h"
#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/activation_codes.h"
#include "kernels/linear/cpu/block_codes.h"
// After the Vec16.
#include "kernels/linear/cpu/compiler_bytes64.h"

namespace kvanta::kernels {
namespace {

struct Bytes64 : CompilerBytes64 {
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    const uint8x16_t entries = vld1q_u8(table);
    return Each(
        [&](U4 y) __attribute__((always_inline)) { return (U4)vqtbl1q_u8(entries, (uint8x16_t)y); }, x);
  }
};

template <BlockLayout kLayout>
struct ByteDots : ByteCodes {
  // Sums in int32 and as many in f32: four registers each.
  static constexpr int kRowTile = !kSmallTiles && kLayout.Subs() == 1 ? 3 : 2;
  static constexpr int kQuads = 8 / kLayout.Subs();  // quads per dot

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    if constexpr (kIsFlipped) {
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) dots[row] = dots[row] + Vec16::SetInt(SumOf<kSub>(x + row * stride));
    }
    AddQuads<kRows, kSub * kQuads, (kSub + 1) * kQuads>(w, x, stride, dots);
  }

 private:
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static constexpr bool kIsMixed = kLayout.MaxCode() > 127, kIsFlipped = false;
#else
  // Codes that do not fit signed bytes are multiplied less 128, and 128 times the sum of x makes up for it.
  static constexpr bool kIsMixed = false, kIsFlipped = kLayout.MaxCode() > 127;
#endif

  // 128 times the sum of the codes of x for sub-block kSub.
  template <int kSub>
  static KVANTA_INLINE int32_t SumOf(const uint8_t* x) {
    I4 less{};
#pragma GCC unroll 2
    for (int i = kSub * kQuads; i < (kSub + 1) * kQuads; i += 4) {
      less = DotSigned(less, LoadVector<U4>(x + i * 4), Broadcast(0x80808080U));
    }
    return -vaddvq_s32((int32x4_t)less);
  }

  static KVANTA_INLINE I4 Dot(I4 sum, U4 codes, U4 x) {
    if constexpr (kIsMixed) return DotMixed(sum, codes, x);
    if constexpr (kIsFlipped) return DotSigned(sum, codes ^ 0x80808080U, x);
    return DotSmall(sum, codes, x);
  }

  template <int kRows, int kQuad, int kEnd>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const Vec16::U codes = UnpackQuad<Bytes64, kLayout, kQuad>(w);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const U4 quad = Broadcast(LoadWord(x + row * stride + kQuad * 4));
      dots[row] = Each(
          [&](I4 sum, U4 four) __attribute__((always_inline)) { return Dot(sum, four, quad); }, dots[row], codes);
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kQuad + 1, kEnd>(w, x, stride, dots);
  }
};

template <BlockLayout kLayout, bool kIsWide>
using BlockDots = typename WidthOf<ByteDots<kLayout>, kIsWide>::Type;

}  // namespace
}  // namespace kvanta::kernels
