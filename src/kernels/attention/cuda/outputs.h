// A warp's output accumulators. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

// 4 accumulator tiles per block of 32 channels: tile i of block b holds channels 32 b + 8 t + i and 32 b + 8 t + 4 + i
// of rows g and g + 8.

// In registers; requires unrolled code.
template <int kBlocks>
struct RegisterOutputs {
  static constexpr bool kUnrolled = true;
  static constexpr int kMaxBlocks = kBlocks;
  float out[kBlocks][4][4];

  KVANTA_DEVICE void Load(int block, float (&to)[4][4]) const {
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) to[i / 4][i % 4] = out[block][i / 4][i % 4];
  }
  KVANTA_DEVICE void Store(int block, const float (&from)[4][4]) {
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) out[block][i / 4][i % 4] = from[i / 4][i % 4];
  }
};

// In shared memory, where the warp's results end up: any number of blocks, few registers.
struct SharedOutputs {
  static constexpr bool kUnrolled = false;
  static constexpr int kMaxBlocks = 8;
  int base;  // of the lane: 16 bytes of each tile

  KVANTA_DEVICE void Load(int block, float (&to)[4][4]) const {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto vec = LoadShared<Vec4>(base + (4 * block + i) * kTileBytes);
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) to[i][e] = std::bit_cast<float>(vec.word[e]);
    }
  }
  KVANTA_DEVICE void Store(int block, const float (&from)[4][4]) {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      Vec4 vec;
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) vec.word[e] = std::bit_cast<uint32_t>(from[i][e]);
      StoreShared(base + (4 * block + i) * kTileBytes, vec);
    }
  }
  static constexpr int kTileBytes = 16 * kWarp;
};

}  // namespace kvanta::kernels::cuda
