// Dots of blocks of 32 k with 16 columns, as x86/blocks_avx2.h describes them: compiler vectors.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/vec16_portable.h"
#include "kernels/linear/cpu/activation_codes.h"
#include "kernels/linear/cpu/block_codes.h"
// After the Vec16.
#include "kernels/linear/cpu/compiler_bytes64.h"

namespace kvanta::kernels {
namespace {

struct Bytes64 : CompilerBytes64 {
  static KVANTA_INLINE V LookUp(V x, const uint8_t* table) {
    uint8_t bytes[64];
    std::memcpy(bytes, &x, sizeof bytes);
    for (uint8_t& byte : bytes) byte = table[byte];
    return Load(bytes);
  }
};

template <BlockLayout kLayout>
struct ByteDots : ByteCodes {
  static constexpr int kRowTile = 2;
  static constexpr int kQuads = 8 / kLayout.Subs();

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    AddQuads<kRows, kSub * kQuads, (kSub + 1) * kQuads>(w, x, stride, dots);
  }

 private:
  template <int kRows, int kQuad, int kEnd>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const Vec16::U codes = UnpackQuad<Bytes64, kLayout, kQuad>(w);
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      dots[row] = AddBytes<false>(dots[row], codes, SignedBytes(x + row * stride + kQuad * 4));
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kQuad + 1, kEnd>(w, x, stride, dots);
  }
};

template <BlockLayout kLayout, bool kIsWide>
using BlockDots = typename WidthOf<ByteDots<kLayout>, kIsWide>::Type;

}  // namespace
}  // namespace kvanta::kernels
