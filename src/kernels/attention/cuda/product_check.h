// Compares the products of warpgroups with those of warps, bit by bit: attention of tile groups uses the former, all
// other attention the latter, and a row's bits must not depend on which. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/decoded_cells.h"

namespace kvanta::kernels::cuda {

// Random operands in the shapes of warpgroup_tile.h: products of two steps of 16 k, added to other values.
struct ProductCheck {
  static constexpr int kThreads = 4 * kWarp;
  static constexpr int kSteps = 2;
  static constexpr int kMaxTiles = 16;  // of 8 columns
  static constexpr int kSharedBytes = kSteps * 2 * kMaxTiles * kCoreBytes;

  // Adds the number of results that differ; of one block.
  static KVANTA_DEVICE void Run(int64_t* differences) {
    Compare<false, 4>(differences);
    Compare<false, 8>(differences);
    Compare<false, 16>(differences);
    Compare<true, 4>(differences);
    Compare<true, 8>(differences);
    Compare<true, 16>(differences);
  }

 private:
  // Bits of a pair of values between 2^-8 and 2^8, by a number of it.
  template <bool kBf16>
  static KVANTA_DEVICE uint32_t RandomPair(int number) {
    auto bits = static_cast<uint32_t>(number) * 0x9e3779b1U + 0x7f4a7c15U;  // a multiplicative hash
    bits = (bits ^ bits >> 15U) * 0x85ebca6bU;
    bits = (bits ^ bits >> 13U) * 0xc2b2ae35U;
    bits ^= bits >> 16U;
    constexpr uint32_t kMantissas = kBf16 ? 0x807f807fU : 0x83ff83ffU;  // and signs
    constexpr unsigned kExponentShift = kBf16 ? 7 : 10;
    constexpr uint32_t kFirstExponent = (kBf16 ? 127 : 15) - 8;
    const uint32_t low = kFirstExponent + (bits >> 20U) % 16;
    const uint32_t high = kFirstExponent + (bits >> 3U) % 16;
    return (bits & kMantissas) | low << kExponentShift | high << (16 + kExponentShift);
  }

  template <bool kBf16, int kTiles>
  static KVANTA_DEVICE void Compare(int64_t* differences) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    constexpr int kHalfBytes = kTiles * kCoreBytes;  // of 8 k
    const auto matrices = [](int step, int tile) {
      return CoreMatrices{2 * step * kHalfBytes + tile * kCoreBytes, kHalfBytes, kCoreBytes};
    };
    const auto column_pair = [&](int tile, int step, int half) {
      return RandomPair<kBf16>(((tile * kSteps + step) * 2 + half) * kWarp + lane);
    };
    SyncBlock();
    for (int tile = 2 * warp; tile < kTiles; tile += 8) {
      for (int step = 0; step < kSteps; ++step) {
        StoreColumns(matrices(step, tile), lane,
                     {{column_pair(tile, step, 0), column_pair(tile + 1, step, 0), column_pair(tile, step, 1),
                       column_pair(tile + 1, step, 1)}});
      }
    }
    FenceStoresForProducts();
    SyncBlock();
    Vec4 a[kSteps];
    for (int i = 0; i < 4 * kSteps; ++i) {
      a[i / 4].word[i % 4] = RandomPair<kBf16>(4096 + i * kThreads + ThreadIndex());
    }
    float of_warpgroup[kTiles][4], of_warp[kTiles][4];
    for (int i = 0; i < 4 * kTiles; ++i) {
      of_warp[i / 4][i % 4] = static_cast<float>(i * kThreads + ThreadIndex()) * 0x1.3p-9F;
      of_warpgroup[i / 4][i % 4] = of_warp[i / 4][i % 4];
    }
    HoldRegisters(a);
    HoldRegisters(of_warpgroup);
    FenceProducts();
    for (int step = 0; step < kSteps; ++step) {
      WarpgroupMma<kBf16, kTiles>(of_warpgroup, a[step], matrices(step, 0));
    }
    CommitProducts();
    WaitForProducts();
    HoldRegisters(of_warpgroup);
    HoldRegisters(a);
    int64_t count = 0;
    for (int tile = 0; tile < kTiles; ++tile) {
      for (int step = 0; step < kSteps; ++step) {
        Mma<kBf16>(of_warp[tile], a[step], column_pair(tile, step, 0), column_pair(tile, step, 1));
      }
      for (int i = 0; i < 4; ++i) {
        count += std::bit_cast<uint32_t>(of_warp[tile][i]) != std::bit_cast<uint32_t>(of_warpgroup[tile][i]) ? 1 : 0;
      }
    }
    if (count != 0) AtomicAdd(differences, count);
  }
};

}  // namespace kvanta::kernels::cuda
