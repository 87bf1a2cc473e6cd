// Dot products with the codes of the cache in compiler vectors, for any CPU. x86/codes_avx2.h describes Dot(); here
// float codes become f32 lanes, integer codes 16-bit lanes whose products are added in pairs. Dots process 8 lanes at a
// time: 2 sums per row leave registers for decoding.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/prefetcher.h"
#include "kernels/cpu/strided_lines.h"
#include "kernels/cpu/vec16_portable.h"
#include "kernels/cpu/vectors_portable.h"
// After the Vec16.
#include "kernels/attention/cpu/byte_lanes.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kQueryTile = kSmallTiles ? 1 : 4;
inline constexpr int kGroupsUnroll = 1;
inline constexpr int kLinesOfStep = 2;  // lines per prefetcher step

template <class Decode>
struct FloatCode {
  static constexpr int kSub = Decode::kSub;
  static constexpr bool kInteger = false;
  static constexpr int kOffset = 0;
  static constexpr int kOperandBytes = 4;

  static KVANTA_INLINE void Pack(Vec16::F x, uint8_t* out) { std::memcpy(out, &x, sizeof x); }

  template <int kUnroll, int kRows, bool kTail>
  static KVANTA_INLINE void Dot(const StridedLines& lines, const uint8_t* const* operands, const int32_t* /*bias*/,
                                Vec16::F* sums, Prefetcher& prefetch) {
    CombineHalves<kRows, kTail, Vectors<F4, 2>>(
        sums, [&](int first, Vectors<F4, 2>* half) __attribute__((always_inline)) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) half[r] = {};
          for (int64_t i = 0; i < lines.count; ++i) {
            if (i % 4 == 0) prefetch.Step();
            const auto words = LoadVectors<U4, 2>(lines.first + i * lines.stride + first);
#pragma GCC unroll 4
            for (int s = 0; s < kSub; ++s) {
              const auto x = Each(
                  [&](U4 word) __attribute__((always_inline)) { return Decode::Element(word, s); }, words);
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                float c;
                std::memcpy(&c, operands[r] + (i * kSub + s) * 4, 4);
                half[r].v[0] = x.v[0] * Broadcast(c) + half[r].v[0];
                half[r].v[1] = x.v[1] * Broadcast(c) + half[r].v[1];
              }
            }
          }
        });
  }
};

struct DecodeFp16 {
  static constexpr int kSub = 2;
  static KVANTA_INLINE F4 Element(U4 word, int s) { return Vec16::FromFp16(s == 0 ? word & 0xffffU : word >> 16); }
};
struct DecodeE4M3 {
  static constexpr int kSub = 4;
  static KVANTA_INLINE F4 Element(U4 word, int s) {
    const U4 code = s == 3 ? word : word << (24 - 8 * s);
    return (F4)((U4)Vec16::FromUpperE4M3(code) | (U4)((code & 0x7f000000U) == 0x7f000000U));
  }
};
struct DecodeE5M2 {
  static constexpr int kSub = 4;
  static KVANTA_INLINE F4 Element(U4 word, int s) { return Vec16::FromFp16(((word >> (8 * s)) & 0xffU) << 8); }
};

using CodeInt8 = ShortsInt8;
using CodeInt8Values = CodeInt8;

using Bytes8 = ValueLanes<ByteLanes<2>>;
using ValueBytes = Bytes8;
using Bytes16 = PackedLanes<ByteLanes<4>>;

// bytes[i] = table[bytes[i]] of 16 entries; n a multiple of 32.
KVANTA_INLINE void LookUpBytes(const int8_t* table, uint8_t* bytes, int n) {
  for (int i = 0; i < n; ++i) bytes[i] = static_cast<uint8_t>(table[bytes[i]]);
}

using CodeFp32 = FloatCode<DecodeFp32>;
using CodeBf16 = FloatCode<DecodeBf16>;
using CodeFp16 = FloatCode<DecodeFp16>;
using CodeE4M3 = FloatCode<DecodeE4M3>;
using CodeE5M2 = FloatCode<DecodeE5M2>;

}  // namespace
}  // namespace kvanta::kernels
