// Dots of blocks of 32 k with 16 columns, as linear_blocks_avx2.h describes them: compiler vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/lanes_portable.h"
#include "kernels/cpu/linear_codes.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kBlockRowTile = 2;

struct Int4Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Lanes::I* dots) {
    for (int row = 0; row < kRows; ++row) dots[row] = Lanes::I{};
    for (uint32_t pair = 0; pair < 4; ++pair) {
      Lanes::U packed;
      std::memcpy(&packed, w + pair * 64, sizeof packed);
      for (uint32_t k = 0; k < 8; ++k) {  // the first four in the low halves of the bytes
        const Lanes::I codes = (Lanes::I)((packed >> (k % 4 * 8 + k / 4 * 4)) & 15U);
        for (int row = 0; row < kRows; ++row) {
          dots[row] += codes * static_cast<int32_t>(static_cast<int8_t>(x[row * stride + pair * 8 + k]));
        }
      }
    }
  }
};

struct Int8Dot : ByteCodes {
  template <int kRows>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, Lanes::I* dots) {
    for (int row = 0; row < kRows; ++row) dots[row] = Lanes::I{};
    for (uint32_t quad = 0; quad < 8; ++quad) {
      Lanes::U packed;
      std::memcpy(&packed, w + quad * 64, sizeof packed);
      for (uint32_t k = 0; k < 4; ++k) {
        const Lanes::I codes = (Lanes::I)((packed >> (k * 8)) & 255U);
        for (int row = 0; row < kRows; ++row) {
          dots[row] += codes * static_cast<int32_t>(static_cast<int8_t>(x[row * stride + quad * 4 + k]));
        }
      }
    }
  }
};

// 256 high + low.
KVANTA_INLINE Lanes::I CombineTerms(Lanes::I high, Lanes::I low) {
  return high * 256 + low;
}
KVANTA_INLINE Lanes::I AddInt(Lanes::I x, int32_t y) {
  return x + y;
}

template <class Dots>
struct TwoTermDot;  // linear_two_terms.h
using Int8WideDot = TwoTermDot<Int8Dot>;

}  // namespace
}  // namespace kvanta::kernels
