// Compiler vectors of 16 bytes, which every x86-64 and every aarch64 CPU supports, in groups of two or four. The
// compiler keeps larger vectors in memory.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));
using U4 = uint32_t __attribute__((vector_size(16)));
using S8 = int16_t __attribute__((vector_size(16)));
using U8 = uint16_t __attribute__((vector_size(16)));
using B16 = uint8_t __attribute__((vector_size(16)));
using C16 = int8_t __attribute__((vector_size(16)));

// No loops over `v`: an array with a variable index stays in memory.
template <class V, int kCount>
struct Vectors {
  V v[kCount];
};

// Applies op to every vector.
template <class Op, int kCount, class... V>
KVANTA_INLINE auto Each(Op op, Vectors<V, kCount>... x) {
  using R = decltype(op(x.v[0]...));
  static_assert(kCount == 2 || kCount == 4);
  if constexpr (kCount == 2) {
    return Vectors<R, 2>{{op(x.v[0]...), op(x.v[1]...)}};
  } else {
    return Vectors<R, 4>{{op(x.v[0]...), op(x.v[1]...), op(x.v[2]...), op(x.v[3]...)}};
  }
}

template <class V, int kCount>
KVANTA_INLINE Vectors<V, kCount> operator+(Vectors<V, kCount> a, Vectors<V, kCount> b) {
  return Each(
      [](V x, V y) __attribute__((always_inline)) { return x + y; }, a, b);
}
template <class V, int kCount>
KVANTA_INLINE Vectors<V, kCount> operator*(Vectors<V, kCount> a, Vectors<V, kCount> b) {
  return Each(
      [](V x, V y) __attribute__((always_inline)) { return x * y; }, a, b);
}
template <class V, int kCount>
KVANTA_INLINE Vectors<V, kCount> operator|(Vectors<V, kCount> a, Vectors<V, kCount> b) {
  return Each(
      [](V x, V y) __attribute__((always_inline)) { return x | y; }, a, b);
}

// Bit cast.
template <class To, class V, int kCount>
KVANTA_INLINE Vectors<To, kCount> Cast(Vectors<V, kCount> x) {
  return Each(
      [](V y) __attribute__((always_inline)) { return (To)y; }, x);
}

template <class V>
KVANTA_INLINE V LoadVector(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class V, int kCount>
KVANTA_INLINE Vectors<V, kCount> LoadVectors(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  if constexpr (kCount == 2) {
    return {{LoadVector<V>(bytes), LoadVector<V>(bytes + 16)}};
  } else {
    return {{LoadVector<V>(bytes), LoadVector<V>(bytes + 16), LoadVector<V>(bytes + 32), LoadVector<V>(bytes + 48)}};
  }
}

KVANTA_INLINE F4 Broadcast(float x) {
  return F4{x, x, x, x};
}
KVANTA_INLINE U4 Broadcast(uint32_t x) {
  return U4{x, x, x, x};
}
KVANTA_INLINE uint32_t LoadWord(const uint8_t* four) {
  uint32_t word;
  std::memcpy(&word, four, sizeof word);
  return word;
}

// Widens 16 bytes or 16-bit words to 32-bit lanes.
KVANTA_INLINE U4 WidenLow(U8 x) {
  return (U4)__builtin_shufflevector(x, U8{}, 0, 8, 1, 9, 2, 10, 3, 11);
}
KVANTA_INLINE U4 WidenHigh(U8 x) {
  return (U4)__builtin_shufflevector(x, U8{}, 4, 12, 5, 13, 6, 14, 7, 15);
}
KVANTA_INLINE Vectors<U4, 4> WidenShorts(const uint16_t* p) {
  const U8 a = LoadVector<U8>(p), b = LoadVector<U8>(p + 8);
  return {{WidenLow(a), WidenHigh(a), WidenLow(b), WidenHigh(b)}};
}
KVANTA_INLINE Vectors<U4, 4> WidenBytes(const uint8_t* p) {
  const B16 x = LoadVector<B16>(p);
  const U8 a = (U8)__builtin_shufflevector(x, B16{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const U8 b = (U8)__builtin_shufflevector(x, B16{}, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return {{WidenLow(a), WidenHigh(a), WidenLow(b), WidenHigh(b)}};
}

// Operations that compilers do not recognize in the loops below.
#if defined(__SSE2__)
// sum + a0 b0 + a1 b1 of the two halves of each lane.
KVANTA_INLINE I4 AddProducts(I4 sum, S8 a, S8 b) {
  return sum + (I4)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
// Packs to 16 bits, to unsigned and to signed 8 bits, saturating.
KVANTA_INLINE S8 PackShorts(I4 a, I4 b) {
  return (S8)_mm_packs_epi32((__m128i)a, (__m128i)b);
}
KVANTA_INLINE B16 PackUnsigned(S8 a, S8 b) {
  return (B16)_mm_packus_epi16((__m128i)a, (__m128i)b);
}
KVANTA_INLINE C16 PackSigned(S8 a, S8 b) {
  return (C16)_mm_packs_epi16((__m128i)a, (__m128i)b);
}
#elif defined(__ARM_NEON)
KVANTA_INLINE I4 AddProducts(I4 sum, S8 a, S8 b) {
  const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return sum + (I4)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
}
KVANTA_INLINE S8 PackShorts(I4 a, I4 b) {
  return (S8)vqmovn_high_s32(vqmovn_s32((int32x4_t)a), (int32x4_t)b);
}
KVANTA_INLINE B16 PackUnsigned(S8 a, S8 b) {
  return (B16)vqmovun_high_s16(vqmovun_s16((int16x8_t)a), (int16x8_t)b);
}
KVANTA_INLINE C16 PackSigned(S8 a, S8 b) {
  return (C16)vqmovn_high_s16(vqmovn_s16((int16x8_t)a), (int16x8_t)b);
}
#else
KVANTA_INLINE int32_t Clamp(int32_t x, int32_t min, int32_t max) {
  return x < min ? min : x > max ? max : x;
}
KVANTA_INLINE I4 AddProducts(I4 sum, S8 a, S8 b) {
  for (int i = 0; i < 4; ++i) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
}
KVANTA_INLINE S8 PackShorts(I4 a, I4 b) {
  S8 x{};
  for (int i = 0; i < 8; ++i) x[i] = static_cast<int16_t>(Clamp(i < 4 ? a[i % 4] : b[i % 4], -32768, 32767));
  return x;
}
KVANTA_INLINE B16 PackUnsigned(S8 a, S8 b) {
  B16 x{};
  for (int i = 0; i < 16; ++i) x[i] = static_cast<uint8_t>(Clamp(i < 8 ? a[i % 8] : b[i % 8], 0, 255));
  return x;
}
KVANTA_INLINE C16 PackSigned(S8 a, S8 b) {
  C16 x{};
  for (int i = 0; i < 16; ++i) x[i] = static_cast<int8_t>(Clamp(i < 8 ? a[i % 8] : b[i % 8], -128, 127));
  return x;
}
#endif

// Bytes of lanes widened to 16 bits: bytes 0 and 2, or 1 and 3, by masks and shifts.
KVANTA_INLINE S8 EvenBytes(U4 x) {
  return (S8)(x & 0x00ff00ffU);
}
KVANTA_INLINE S8 OddBytes(U4 x) {
  return (S8)((U8)x >> 8);
}
KVANTA_INLINE S8 SignedEvenBytes(U4 x) {
  return (S8)((U8)x << 8) >> 8;
}
KVANTA_INLINE S8 SignedOddBytes(U4 x) {
  return (S8)x >> 8;
}

// Bytes of lanes, or four bytes broadcast to all lanes, as pairs of 16 bits.
struct FourBytes {
  S8 even, odd;
};
template <bool kSigned>
KVANTA_INLINE FourBytes Split(U4 x) {
  if constexpr (kSigned) return {SignedEvenBytes(x), SignedOddBytes(x)};
  return {EvenBytes(x), OddBytes(x)};
}
KVANTA_INLINE FourBytes SignedBytes(const uint8_t* four) {
  return Split<true>(Broadcast(LoadWord(four)));
}
KVANTA_INLINE FourBytes UnsignedBytes(const uint8_t* four) {
  return Split<false>(Broadcast(LoadWord(four)));
}

// sum + the products of the lanes' bytes, signed or not, with the four bytes y.
template <bool kSigned, int kCount>
KVANTA_INLINE Vectors<I4, kCount> AddBytes(Vectors<I4, kCount> sum, Vectors<U4, kCount> x, FourBytes y) {
  return Each(
      [&](I4 s, U4 b) __attribute__((always_inline)) {
        const FourBytes split = Split<kSigned>(b);
        return AddProducts(AddProducts(s, split.even, y.even), split.odd, y.odd);
      },
      sum, x);
}

}  // namespace
}  // namespace kvanta::kernels
