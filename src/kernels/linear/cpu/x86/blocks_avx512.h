// Dots of blocks of 32 k with 16 columns, as blocks_avx2.h describes them: AVX-512 VNNI.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/cpu/x86/bytes_512.h"
#include "kernels/cpu/x86/vec16_avx512.h"
#include "kernels/linear/cpu/activation_codes.h"
#include "kernels/linear/cpu/block_codes.h"

namespace kvanta::kernels {
namespace {

template <BlockLayout kLayout>
struct ByteDots : ByteCodes {
  // Sums in int32 and as many in f32, beside the weights and scales; three kinds of sums where blocks have sub-blocks.
  static constexpr int kRowTile = kSmallTiles ? 2 : kLayout.Subs() == 1 ? Vec16::kRowTile : 8;
  static constexpr int kQuads = 8 / kLayout.Subs();  // of a dot

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    AddQuads<kRows, kSub * kQuads, (kSub + 1) * kQuads>(w, x, stride, dots);
  }

 private:
  template <int kRows, int kQuad, int kEnd>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    const __m512i codes = UnpackQuad<Bytes16, kLayout, kQuad>(w);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      dots[row] = _mm512_dpbusd_epi32(dots[row], codes, Broadcast32(x + row * stride + kQuad * 4));
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kQuad + 1, kEnd>(w, x, stride, dots);
  }
};

template <BlockLayout kLayout, bool kIsWide>
using BlockDots = typename WidthOf<ByteDots<kLayout>, kIsWide>::Type;

}  // namespace
}  // namespace kvanta::kernels
