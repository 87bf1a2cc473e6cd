// AMX: eight registers of 16 rows of 64 bytes ("tiles"), and products of two of them that are added to a third.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = kTileRows * 64;

#ifdef KVANTA_EMULATE_AMX
using Tiles = testing::EmulatedTiles;
#else

// A row of the first operand meets a column of the second one: groups of 4 bytes (or of 2 bf16) of the row, one after
// the other, with the column's groups, which lie one below the other. Sums are 32-bit integers, or f32.
// What an instruction does to memory is told to the compiler; of what it does to tiles, compilers know nothing.
struct Tiles {
  // All eight as large as they can be. To be called by a thread before it uses tiles; what another library has set up
  // is lost.
  static KVANTA_INLINE void Configure() {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
    } const config;
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  // Back to no tiles, which a thread can be interrupted with at less cost.
  static KVANTA_INLINE void Release() { __asm__ volatile("tilerelease" ::); }

  template <int kTile>
  static KVANTA_INLINE void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  // Row i is at rows + i * stride.
  template <int kTile>
  static KVANTA_INLINE void Load(const uint8_t* rows, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static KVANTA_INLINE void Store(uint8_t* rows, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
  }

  // kSum += kRows x kColumns, of signed bytes with signed ones, and so on.
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotSignedSigned() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotSignedUnsigned() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotUnsignedSigned() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
  // Products of the first of all pairs are one chain of multiply-adds, those of the second another; subnormals are 0.
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotBf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
};
#endif

}  // namespace
}  // namespace kvanta::kernels
