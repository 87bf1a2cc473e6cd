// AMX tiles in plain loops, by Intel's manual: replaces the instructions in the unit under test.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvanta::testing {

struct EmulatedTiles {
  struct AllRows {
    uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16};
    uint8_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
  };
  template <class Shapes = AllRows>
  static void Configure(const Shapes& shapes = {}) {
    std::memset(tiles, 0, sizeof tiles);
    std::memcpy(heights, shapes.rows, sizeof heights);
    std::memcpy(widths, shapes.row_bytes, sizeof widths);
    configured = true;
  }
  static void Release() { configured = false; }

  template <int kTile>
  static void Zero() {
    std::memset(At(kTile), 0, sizeof tiles[kTile]);
  }
  template <int kTile>
  static void Load(const uint8_t* rows, int64_t stride) {
    for (int i = 0; i < heights[kTile]; ++i) std::memcpy(At(kTile)[i], rows + i * stride, widths[kTile]);
  }
  template <int kTile>
  static void Store(uint8_t* rows, int64_t stride) {
    for (int i = 0; i < heights[kTile]; ++i) std::memcpy(rows + i * stride, At(kTile)[i], widths[kTile]);
  }
  template <int kSum, int kRows, int kColumns>
  static void DotSignedSigned() {
    DotBytes<int8_t, int8_t>(kSum, kRows, kColumns);
  }
  template <int kSum, int kRows, int kColumns>
  static void DotUnsignedSigned() {
    DotBytes<uint8_t, int8_t>(kSum, kRows, kColumns);
  }
  // Two chains of fused multiply-adds; their sum is added to the accumulator.
  template <int kSum, int kRows, int kColumns>
  static void DotBf16() {
    CheckHeights(kSum, kRows, kColumns);
    Tile &sums = At(kSum), &rows = At(kRows), &columns = At(kColumns);
    for (int row = 0; row < heights[kRows]; ++row) {
      for (int column = 0; column < 16; ++column) {
        float chains[2] = {};
        for (int k = 0; k < widths[kRows] / 2; ++k) {
          const float a = Bf16(rows[row] + 2 * k);
          const float b = Bf16(columns[k / 2] + 4 * column + k % 2 * 2);
          chains[k % 2] = Flush(__builtin_fmaf(a, b, chains[k % 2]));
        }
        float sum;
        std::memcpy(&sum, sums[row] + 4 * column, sizeof sum);
        sum = Flush(Flush(sum) + Flush(chains[0] + chains[1]));
        std::memcpy(sums[row] + 4 * column, &sum, sizeof sum);
      }
    }
  }

 private:
  using Tile = uint8_t[16][64];

  // A CPU faults on unconfigured tiles and on mismatched shapes.
  static Tile& At(int tile) {
    if (!configured) std::abort();
    return tiles[tile];
  }
  static void CheckHeights(int sum, int rows, int columns) {
    if (heights[sum] != heights[rows] || heights[columns] * 4 != widths[rows] || widths[sum] != widths[columns]) {
      std::abort();
    }
  }
  // Flushes subnormals to 0.
  static float Flush(float x) { return __builtin_fabsf(x) < 0x1p-126F ? 0.0F : x; }
  static float Bf16(const uint8_t* bytes) {
    uint8_t wide[4] = {0, 0, bytes[0], bytes[1]};
    float x;
    std::memcpy(&x, wide, sizeof x);
    return Flush(x);
  }
  template <class A, class B>
  static void DotBytes(int sum_tile, int a_tile, int b_tile) {
    CheckHeights(sum_tile, a_tile, b_tile);
    Tile &sums = At(sum_tile), &a = At(a_tile), &b = At(b_tile);
    for (int row = 0; row < heights[a_tile]; ++row) {
      for (int column = 0; column < 16; ++column) {
        int32_t sum;
        std::memcpy(&sum, sums[row] + 4 * column, sizeof sum);
        for (int k = 0; k < widths[a_tile]; ++k) {
          sum += static_cast<A>(a[row][k]) * static_cast<B>(b[k / 4][4 * column + k % 4]);
        }
        std::memcpy(sums[row] + 4 * column, &sum, sizeof sum);
      }
    }
  }

  static inline thread_local Tile tiles[8];
  static inline thread_local uint8_t heights[8], widths[8];  // rows, and their bytes
  static inline thread_local bool configured = false;
};

}  // namespace kvanta::testing
