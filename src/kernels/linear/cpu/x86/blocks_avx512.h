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
  // Codes with a scale per 16 are unpacked once for all tiles: they have more bits to put together, and fewer rows
  // share a panel.
  static constexpr bool kExpands = kLayout.Subs() == 2 && !kLayout.is_expanded;
  // 16 rows of many bytes wait for memory: fewer tiles read them less often.
  static constexpr bool kStreams = kLayout.low_bits == 8 && !kLayout.is_expanded;
  static constexpr int kPanels = kExpands || kStreams ? 1 : 2;
  // Registers hold kSums sums in int32 and kSums in f32 in addition to the weights and scales; three kinds of sums
  // where blocks have sub-blocks.
  static constexpr int kSums = kSmallTiles ? 2 : kLayout.Subs() == 1 ? Vec16::kRowTile : 8;
  static constexpr int kRowTile = kSums / kPanels;
  static constexpr int kQuads = 8 / kLayout.Subs();  // quads per dot

  template <int kRows, int kSub>
  static KVANTA_INLINE void AddDots(const uint8_t* w, const uint8_t* x, int64_t stride, Vec16::I* dots) {
    AddQuads<kRows, 1, kSub * kQuads, (kSub + 1) * kQuads>(w, 0, x, stride, dots);
  }
  // Dots [kRows][kTilePanels] of several panels, w_panel bytes apart, which share the broadcasts of x.
  template <int kRows, int kTilePanels, int kSub>
  static KVANTA_INLINE void AddPanelDots(const uint8_t* w, int64_t w_panel, const uint8_t* x, int64_t stride,
                                         Vec16::I* dots) {
    AddQuads<kRows, kTilePanels, kSub * kQuads, (kSub + 1) * kQuads>(w, w_panel, x, stride, dots);
  }
  // Writes the unpacked codes of a block, [32 / 4] quads of 64 bytes.
  template <int kQuad = 0>
  static KVANTA_INLINE void Expand(const uint8_t* w, uint8_t* out) {
    const __m512i codes = UnpackQuad<Bytes16, kLayout, kQuad>(w);
    _mm512_store_si512(out + kQuad * 64, codes);
    if constexpr (kQuad + 1 < 8) Expand<kQuad + 1>(w, out);
  }

 private:
  template <int kRows, int kTilePanels, int kQuad, int kEnd>
  static KVANTA_INLINE void AddQuads(const uint8_t* w, int64_t w_panel, const uint8_t* x, int64_t stride,
                                     Vec16::I* dots) {
    __m512i codes[kTilePanels];
#pragma GCC unroll 4
    for (int panel = 0; panel < kTilePanels; ++panel) {
      codes[panel] = UnpackQuad<Bytes16, kLayout, kQuad>(w + panel * w_panel);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const __m512i values = Broadcast32(x + row * stride + kQuad * 4);
#pragma GCC unroll 4
      for (int panel = 0; panel < kTilePanels; ++panel) {
        Vec16::I& dot = dots[row * kTilePanels + panel];
        dot = _mm512_dpbusd_epi32(dot, codes[panel], values);
      }
    }
    if constexpr (kQuad + 1 < kEnd) AddQuads<kRows, kTilePanels, kQuad + 1, kEnd>(w, w_panel, x, stride, dots);
  }
};

template <BlockLayout kLayout, bool kIsWide>
using BlockDots = typename WidthOf<ByteDots<kLayout>, kIsWide>::Type;

}  // namespace
}  // namespace kvanta::kernels
