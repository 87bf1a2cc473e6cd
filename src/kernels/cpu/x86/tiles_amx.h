// AMX: eight tile registers of 16 rows of 64 bytes, and products of two tiles that are added to a third.
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

// Rows of each tile register in use, and their bytes: those of a first operand are the rows of the second, times 4. A
// product takes time proportional to the rows of its first operand.
struct TileShapes {
  uint8_t rows[kTileRegisters] = {16, 16, 16, 16, 16, 16, 16, 16};
  uint8_t row_bytes[kTileRegisters] = {64, 64, 64, 64, 64, 64, 64, 64};
};

// Calls f(Index<i>) for i < kCount: tile registers are named by constants.
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

// A product of tiles multiplies rows of the first operand by columns of the second: 4 bytes (2 bf16) of the row at a
// time, consecutive, by as many of the column, which are consecutive rows of the tile. Sums are int32 or f32. The
// assembly declares its effects on memory; compilers do not track tile registers.
struct Tiles {
  // A thread must call it before it uses tiles; a configuration made by another library is lost.
  static KVANTA_INLINE void Configure(const TileShapes& shapes = {}) {
    struct alignas(64) {
      uint8_t palette = 1;
      uint8_t start_row = 0;
      uint8_t reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < kTileRegisters; ++tile) {
      config.row_bytes[tile] = shapes.row_bytes[tile];
      config.rows[tile] = shapes.rows[tile];
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
  }
  // Returns to the initial state, in which context switches cost less.
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

  // kSum += kRows * kColumns, products of signed bytes; the variants below differ in the operand types.
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotSignedSigned() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotUnsignedSigned() {
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
  // The first elements of all pairs are one chain of multiply-adds, the second ones another; subnormals are 0.
  template <int kSum, int kRows, int kColumns>
  static KVANTA_INLINE void DotBf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kRows), "i"(kColumns));
  }
};
#endif

}  // namespace
}  // namespace kvanta::kernels
