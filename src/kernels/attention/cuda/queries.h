// A tile's query rows as operands of the tensor cores, in shared memory: transformed, scaled to their row's largest
// value, and in the order of channels that a code's keys have. A unit that includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/codes.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/launch.h"

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

// Heads lie in whole blocks of 32 channels.
constexpr KVANTA_DEVICE int BlocksOf(int head_dim) {
  return (head_dim + 31) / 32;
}
// Operands in the block's shared memory: two products of 16 channels a block, of one to three terms.
constexpr KVANTA_DEVICE int QueryBytes(int terms, int head_dim) {
  return terms * 2 * BlocksOf(head_dim) * kWarp * 16;
}
KVANTA_DEVICE int QueryAt(int term, int step, int head_dim, int lane) {
  return ((term * 2 * BlocksOf(head_dim) + step) * kWarp + lane) * 16;
}

struct QueryRows {
  static constexpr KVANTA_DEVICE int RowBytes(int head_dim) { return 4 * 32 * BlocksOf(head_dim); }

  // Rows of the tile to f32 [16][head_dim] at `rows`, zeros where there are fewer; their scales to f32 [16] at
  // `scales`: powers of two, so that a value is what operands hold times the scale; <q, mean> to f32 [16] at `bias`;
  // the sums of the transformed rows to f32 [16] at `sums`; what meets K's plain channels to f32 [16][unquantized_dim]
  // at `plain`. By all warps of the block, a row each in turn.
  template <bool kHasUnquantized>
  static KVANTA_DEVICE void Load(const AttentionParams& layer, const QueryTile& tile, int head_dim, int rows,
                                 int scales, int bias, int sums, int plain) {
    const int lane = ThreadIndex() % kWarp;
    const int count = tile.tokens * tile.heads;
    for (int r = ThreadIndex() / kWarp; r < kQueryRows; r += kAttendWarps) {
      const int at = rows + r * RowBytes(head_dim);
      const int head = tile.first_head + r % tile.heads;
      const float* q = layer.q + (tile.row + r / tile.heads) * layer.q_stride +
                       int64_t{head} * (kHasUnquantized ? layer.key_dim : head_dim);
      float dot = 0;
      uint32_t largest = 0;
      const auto magnitude = [](float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffU; };
      for (int c = lane; c < head_dim; c += kWarp) {
        const float x = r < count ? q[c] : 0.0F;
        if (layer.k_mean != nullptr) dot = MultiplyAdd(x, layer.k_mean[tile.kv_head * head_dim + c], dot);
        StoreShared(at + 4 * c, x);
      }
      SyncWarp();
      if (kHasUnquantized && layer.unquantized_dim != 0) {
        const int32_t* outliers =
            layer.outliers != nullptr ? layer.outliers + tile.kv_head * layer.unquantized_dim : nullptr;
        for (int i = lane; i < layer.unquantized_dim; i += kWarp) {
          const float x = r < count ? q[outliers != nullptr ? outliers[i] : head_dim + i] : 0.0F;
          StoreShared(plain + r * RowBytes(layer.unquantized_dim) + 4 * i, x);
          if (outliers != nullptr) {
            StoreShared(at + 4 * outliers[i], 0.0F);
          } else {  // has operands of the same scale
            largest = magnitude(x) > largest ? magnitude(x) : largest;
          }
        }
        SyncWarp();
      }
      if (layer.k_hadamard) HadamardRow(at, head_dim, layer.hadamard_block, layer.hadamard_norm, lane);
      float sum = 0;
      for (int c = lane; c < head_dim; c += kWarp) {
        const auto x = LoadShared<float>(at + 4 * c);
        largest = magnitude(x) > largest ? magnitude(x) : largest;
        sum += x;
      }
      for (int mask = 1; mask < kWarp; mask *= 2) {
        const uint32_t other = ShuffleXor(largest, mask);
        largest = other > largest ? other : largest;
        dot += ShuffleXor(dot, mask);
        sum += ShuffleXor(sum, mask);
      }
      int exponent = ExponentOf(std::bit_cast<float>(largest));
      if (exponent < -100) exponent = -100;  // both powers stay normal numbers
      if (exponent > 100) exponent = 100;
      if (lane == 0) {
        StoreShared(scales + 4 * r, PowerOfTwo(exponent - kTopExponent));
        StoreShared(bias + 4 * r, dot);
        StoreShared(sums + 4 * r, sum);
      }
    }
  }

  // Operands for keys of `Side` from these rows to `operands`, by all warps; a barrier of the block before and after.
  template <class Side>
  static KVANTA_DEVICE void Pack(int head_dim, int rows, int scales, int operands) {
    const int lane = ThreadIndex() % kWarp;
    for (int step = ThreadIndex() / kWarp; step < 2 * BlocksOf(head_dim); step += kAttendWarps) {
      Vec4 terms[Side::kTerms];
      KVANTA_UNROLL
      for (int word = 0; word < 4; ++word) {  // rows g, g + 8 of pair 0, then of pair 1
        const int row = lane / 4 + word % 2 * 8;
        const float scale = Side::kBf16 ? 1.0F : 1.0F / LoadShared<float>(scales + 4 * row);
        float x[2];
        KVANTA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int pair = step % 2 * 2 + word / 2;
          const int channel = step / 2 * 32 + KeyOperand<Side>::Channel(pair, half, lane % 4);
          x[half] =
              channel < head_dim ? LoadShared<float>(rows + row * RowBytes(head_dim) + 4 * channel) * scale : 0.0F;
        }
        terms[0].word[word] = Side::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        KVANTA_UNROLL
        for (int term = 1; term < Side::kTerms; ++term) {
          x[0] -= std::bit_cast<float>(terms[term - 1].word[word] << 16U);
          x[1] -= std::bit_cast<float>(terms[term - 1].word[word] & 0xffff0000U);
          terms[term].word[word] = PackBf16(x[0], x[1]);
        }
      }
      for (int term = 0; term < Side::kTerms; ++term) {
        StoreShared(operands + QueryAt(term, step, head_dim, lane), terms[term]);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
