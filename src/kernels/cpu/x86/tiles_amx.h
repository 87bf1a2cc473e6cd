// AMX: eight registers of 16 rows of 64 bytes ("tiles"), and products of two of them that are added to a third.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = kTileRows * 64;
inline constexpr int kTileRegisters = 8;

// Register allocation of all kernels.
inline constexpr int kTilesUnroll = 4;    // sums in tiles 0 to 3, enough to hide the latency of a product
inline constexpr int kSecondOperand = 4;  // and 5
inline constexpr int kFirstOperand = 6;   // and 7

// How many rows of each register are in use. A product takes as long as its first operand has rows.
struct TileRows {
  uint8_t of[kTileRegisters] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// f(Index<i>) for i < kCount: tiles are named by constants.
template <int kIndex>
struct Index {
  static constexpr int kValue = kIndex;
};
template <int kCount, class F>
KVANTA_INLINE void ForTiles(F f) {
  f(Index<0>{});
  if constexpr (kCount > 1) f(Index<1>{});
  if constexpr (kCount > 2) f(Index<2>{});
  if constexpr (kCount > 3) f(Index<3>{});
}

#ifdef KVANTA_EMULATE_AMX
using Tiles = testing::EmulatedTiles;
#else

// A row of the first operand meets a column of the second one: groups of 4 bytes (or of 2 bf16) of the row, one after
// the other, with the column's groups, which lie one below the other. Sums are 32-bit integers, or f32.
// What an instruction does to memory is told to the compiler; of what it does to tiles, compilers know nothing.
struct Tiles {
  // Rows of 64 bytes. To be called by a thread before it uses tiles; what another library has set up is lost.
  static KVANTA_INLINE void Configure(const TileRows& rows = {}) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < kTileRegisters; ++tile) config.rows[tile] = rows.of[tile];
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
