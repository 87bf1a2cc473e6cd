// A warp's output accumulators. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

// Per row tile and block of 32 channels, two accumulator tiles of 16 channels and 8 rows: element 2 c + q of tile i, in
// lane (g, t), is channel 32 block + 4 g + 2 i + c of row 2 t + q.

// In registers; requires unrolled code.
template <int kTiles, int kBlocks>
struct RegisterOutputs {
  static constexpr bool kUnrolled = true;
  static constexpr int kRowTiles = kTiles;
  static constexpr int kMaxBlocks = kBlocks;
  float out[kRowTiles][kBlocks][2][4];

  KVANTA_DEVICE void Load(int block, float (&to)[kRowTiles][2][4]) const {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) to[i / 8][i / 4 % 2][i % 4] = out[i / 8][block][i / 4 % 2][i % 4];
  }
  KVANTA_DEVICE void Store(int block, const float (&from)[kRowTiles][2][4]) {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) out[i / 8][block][i / 4 % 2][i % 4] = from[i / 8][i / 4 % 2][i % 4];
  }
};

// In shared memory, where the warp's results end up: any number of blocks, few registers.
template <int kTiles>
struct SharedOutputs {
  static constexpr bool kUnrolled = false;
  static constexpr int kRowTiles = kTiles;
  static constexpr int kMaxBlocks = kMaxHeadDim / 32;
  int base;  // the lane's base: 16 bytes of each tile

  KVANTA_DEVICE void Load(int block, float (&to)[kRowTiles][2][4]) const {
    KVANTA_UNROLL
    for (int tile = 0; tile < 2 * kRowTiles; ++tile) {
      const auto vec = LoadShared<Vec4>(base + TileAt(block, tile));
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) to[tile / 2][tile % 2][e] = std::bit_cast<float>(vec.word[e]);
    }
  }
  KVANTA_DEVICE void Store(int block, const float (&from)[kRowTiles][2][4]) {
    KVANTA_UNROLL
    for (int tile = 0; tile < 2 * kRowTiles; ++tile) {
      Vec4 vec;
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) vec.word[e] = std::bit_cast<uint32_t>(from[tile / 2][tile % 2][e]);
      StoreShared(base + TileAt(block, tile), vec);
    }
  }

  // Offset of an element of lane 0's, by the tile's row and channel.
  static KVANTA_DEVICE int ElementAt(int row, int channel) {
    const int lane = channel % 32 / 4 * 4 + row % kRowsPerMma / 2;
    const int tile = row / kRowsPerMma * 2 + channel % 4 / 2;
    return TileAt(channel / 32, tile) + 16 * lane + 4 * (channel % 2 * 2 + row % 2);
  }

 private:
  static KVANTA_DEVICE int TileAt(int block, int tile) { return (2 * kRowTiles * block + tile) * (16 * kWarp); }
};

}  // namespace kvanta::kernels::cuda
