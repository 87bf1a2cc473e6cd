// Dot products with bf16 and fp8 codes by vdpbf16ps: operands are rounded to bf16, which is as precise as
// bf16 codes and far more so than fp8, and half as many instructions remain as with f32 multiply-adds. Included by
// isa_zen4.cc.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/x86/codes_avx512.h"
#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/x86/vec16_avx512.h"

namespace kvanta::kernels {
namespace {

template <class Decode>
struct Bf16DotCode {
  static constexpr int kManyRows = kSmallTiles ? 0 : 8;  // shares loads and decoding among as many rows as fit
  static constexpr int kSub = 2 * Decode::kPairs;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 2;
  static constexpr bool kPackedBySoftmax = true;

  // Stores the even ones of every four first if there are two pairs, as DecodeFp8 pairs codes.
  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) {
    if constexpr (Decode::kPairs == 2) x = _mm512_permute_ps(x, _MM_SHUFFLE(3, 1, 2, 0));
    Vec16::StoreBf16(x, out);
  }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    const Decode decode;
    Vec16::F sum[kRows * kUnroll];
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kUnroll; ++i) sum[i] = Vec16::Zero();
    ForLines(
        lines, prefetch, [&](int64_t i) __attribute__((always_inline)) {
          __m512i pairs[kUnroll][Decode::kPairs];
          for (int v = 0; v < kUnroll; ++v) decode.Pairs(LoadLine<kTail>(lines, i, v), pairs[v]);
#pragma GCC unroll 2
          for (int pair = 0; pair < Decode::kPairs; ++pair) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
              const __m512i operand = Broadcast32(operands[r] + i * (kSub * kOperandBytes) + pair * 4);
              for (int v = 0; v < kUnroll; ++v) {
                sum[r * kUnroll + v] = Vec16::DotBf16Pairs(operand, pairs[v][pair], sum[r * kUnroll + v]);
              }
            }
          }
        });
#pragma GCC unroll 16
    for (int i = 0; i < kRows * kUnroll; ++i) sums[i] = sum[i];
  }
};

using Bf16DotBf16 = Bf16DotCode<DecodeBf16>;
using Bf16DotE4M3 = Bf16DotCode<DecodeFp8<kE4M3Tables>>;
using Bf16DotE5M2 = Bf16DotCode<DecodeFp8<kE5M2Tables>>;

}  // namespace
}  // namespace kvanta::kernels
