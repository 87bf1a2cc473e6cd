// A tile's query rows as operands of the tensor cores, in shared memory: transformed, scaled to their row's largest
// value, and in the order of channels that a code's keys have. A unit that includes this has included the primitives.
#pragma once

#include "kernels/cuda/codes.h"
#include "kernels/cuda/hadamard_rows.h"
#include "kernels/cuda/launch.h"

namespace kvanta::kernels::cuda {

// f16 operands are scaled by powers of two so that the largest lies in [2^14, 2^15): the smallest that still counts is
// 2^-38 of it.
inline constexpr int kTopExponent = 14;

constexpr KVANTA_DEVICE float PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent < -126 ? 0 : exponent + 127) << 23U);
}
// floor(log2 |x|) of a normal number; -127 of zero and subnormal ones, 128 of infinity and NaN.
KVANTA_DEVICE int ExponentOf(float x) {
  return static_cast<int>((std::bit_cast<uint32_t>(x) >> 23U) & 0xffU) - 127;
}

// Sizes and places in the block's shared memory of the queries of one code.
template <Code kCode, int kDim>
struct KeySteps {
  using Operand = CodeOperand<kCode>;
  static constexpr int kUnits = kDim / Operand::kPanelChannels;
  static constexpr int kLoads = (kUnits + 3) / 4;                  // of 4 units, one for each t
  static constexpr int kSteps = kLoads * Operand::kRegisters / 2;  // products of 16 channels
  static constexpr int kBytes = Operand::kTerms * kSteps * kWarp * 16;

  // Channel of half `half` of pair `pair` of step `step` for lanes with t; kDim or more where there is none.
  static KVANTA_DEVICE int Channel(int step, int pair, int half, int t) {
    const int registers = 2 * step + pair;
    const int unit = registers / Operand::kRegisters * 4 + t;
    return unit * Operand::kPanelChannels + Operand::KeyChannel(registers % Operand::kRegisters, half);
  }
  static KVANTA_DEVICE int At(int term, int step, int lane) { return ((term * kSteps + step) * kWarp + lane) * 16; }
};

template <int kDim>
struct QueryRows {
  static constexpr int kRowBytes = 4 * kDim;
  static constexpr int kBytes = kQueryRows * kRowBytes;

  // Rows of the tile to f32 [16][kDim] at `rows`, zeros where there are fewer; their scales to f32 [16] at `scales`:
  // powers of two, so that a value is what operands hold times the scale; <q, mean> to f32 [16] at `bias`. By all warps
  // of the block, a row each in turn.
  static KVANTA_DEVICE void Load(const AttendLayer& layer, const QueryTile& tile, int rows, int scales, int bias) {
    const int lane = ThreadIndex() % kWarp;
    const int count = tile.tokens * tile.heads;
    for (int r = ThreadIndex() / kWarp; r < kQueryRows; r += kAttendWarps) {
      const int at = rows + r * kRowBytes;
      const int head = tile.first_head + r % tile.heads;
      const float* q = layer.q + (tile.row + r / tile.heads) * layer.q_stride + int64_t{head} * kDim;
      float dot = 0;
      for (int c = lane; c < kDim; c += kWarp) {
        const float x = r < count ? q[c] : 0.0F;
        if (layer.k_mean != nullptr) dot = MultiplyAdd(x, layer.k_mean[tile.kv_head * kDim + c], dot);
        StoreShared(at + 4 * c, x);
      }
      SyncWarp();
      if (layer.k_hadamard) HadamardRow(at, kDim, layer.hadamard_block, layer.hadamard_norm, lane);
      uint32_t largest = 0;
      for (int c = lane; c < kDim; c += kWarp) {
        const uint32_t bits = std::bit_cast<uint32_t>(LoadShared<float>(at + 4 * c)) & 0x7fffffffU;
        largest = bits > largest ? bits : largest;
      }
      for (int mask = 1; mask < kWarp; mask *= 2) {
        const uint32_t other = ShuffleXor(largest, mask);
        largest = other > largest ? other : largest;
        dot += ShuffleXor(dot, mask);
      }
      int exponent = ExponentOf(std::bit_cast<float>(largest));
      if (exponent < -100) exponent = -100;  // both powers stay normal numbers
      if (exponent > 100) exponent = 100;
      if (lane == 0) {
        StoreShared(scales + 4 * r, PowerOfTwo(exponent - kTopExponent));
        StoreShared(bias + 4 * r, dot);
      }
    }
  }

  // Operands of `kCode` from these rows to `operands`, by all warps; a barrier of the block before and after.
  template <Code kCode>
  static KVANTA_DEVICE void Pack(int rows, int scales, int operands) {
    using Steps = KeySteps<kCode, kDim>;
    using Operand = CodeOperand<kCode>;
    const int lane = ThreadIndex() % kWarp;
    const int t = lane % 4;
    for (int step = ThreadIndex() / kWarp; step < Steps::kSteps; step += kAttendWarps) {
      Words4 terms[2];
      for (int word = 0; word < 4; ++word) {  // rows g, g + 8 of pair 0, then of pair 1
        const int row = lane / 4 + word % 2 * 8;
        const float scale = Operand::kBf16 ? 1.0F : 1.0F / LoadShared<float>(scales + 4 * row);
        float x[2];
        for (int half = 0; half < 2; ++half) {
          const int channel = Steps::Channel(step, word / 2, half, t);
          x[half] = channel < kDim ? LoadShared<float>(rows + row * kRowBytes + 4 * channel) * scale : 0.0F;
        }
        terms[0].word[word] = Operand::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        if constexpr (Operand::kTerms == 2) {
          const float high[2] = {std::bit_cast<float>(terms[0].word[word] << 16U),
                                 std::bit_cast<float>(terms[0].word[word] & 0xffff0000U)};
          terms[1].word[word] = PackBf16(x[0] - high[0], x[1] - high[1]);
        }
      }
      for (int term = 0; term < Operand::kTerms; ++term) {
        StoreShared(operands + Steps::At(term, step, lane), terms[term]);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
