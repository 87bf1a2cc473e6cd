// Storage of the 32 integer codes of a block of x, as the dots of weight blocks (blocks_<isa>.h) read them.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Dots that multiply the rows of a register tile by one panel, whose codes each tile unpacks.
struct PanelDots {
  static constexpr int kPanels = 1;
  static constexpr bool kExpands = false;
};

// Codes of magnitude up to 127.
struct ByteCodes : PanelDots {
  using X = int8_t[32];

  static KVANTA_INLINE void Store(const int32_t* codes, X& out) {
    for (int i = 0; i < 32; ++i) out[i] = static_cast<int8_t>(codes[i]);
  }
};

// Codes of magnitude up to 32,512 as two bytes each, for a unit whose dots multiply bytes: 256 high + low, high up to
// 127, low from -128 to 127. Exact in int32.
template <class Dots>
struct TwoTermDots : PanelDots {
  static constexpr int kTileSums = Dots::kRowTile * Dots::kPanels;
  static constexpr int kRowTile = kTileSums < 8 ? kTileSums : 8;  // registers hold two sums of each
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

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    Vec16::I high[kRows];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) high[row] = Vec16::SetInt(0);
    Dots::template AddDots<kRows, kSub>(w, x, stride, high);
    Dots::template AddDots<kRows, kSub>(w, x + sizeof(typename Dots::X), stride, dots);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) dots[row] = Vec16::CombineTerms(high[row], dots[row]);
  }
};

// Codes of activations for the dots of bytes: one byte each, or two where they are wide.
template <class Dots, bool kIsWide>
struct WidthOf {
  using Type = Dots;
};
template <class Dots>
struct WidthOf<Dots, true> {
  using Type = TwoTermDots<Dots>;
};

}  // namespace
}  // namespace kvanta::kernels
