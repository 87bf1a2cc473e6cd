// Codes of x of 16 bits as two of 8, for the including ISA unit's dots of bytes.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Codes of magnitude up to 32,512: 256 high + low, high up to 127, low from -128 to 127. Exact in int32.
template <class Dots>
struct TwoTermDot {
  struct X {
    typename Dots::X high, low;
  };

  static KVANTA_INLINE void Store(const int32_t* codes, X& out) {
    int32_t high[32], low[32];
    for (int i = 0; i < 32; ++i) {
      high[i] = (codes[i] + 128) >> 8;
      low[i] = codes[i] - high[i] * 256;
    }
    Dots::Store(high, out.high);
    Dots::Store(low, out.low);
  }

  template <int kRows, class I>
  static KVANTA_INLINE void Dot(const uint8_t* w, const uint8_t* x, int64_t stride, I* dots) {
    I low[kRows];
    Dots::template Dot<kRows>(w, x, stride, dots);
    Dots::template Dot<kRows>(w, x + sizeof(typename Dots::X), stride, low);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) dots[row] = CombineTerms(dots[row], low[row]);
  }
};

}  // namespace
}  // namespace kvanta::kernels
