// A tile's query rows as tensor-core operands in shared memory: transformed, scaled by the row's largest value, in the
// channel order of the key codes. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/codes.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/matrix_rows.h"

namespace kvanta::kernels::cuda {

// f16 operands are scaled by powers of two so that the largest is in [2^14, 2^15); the smallest nonzero one is 2^-38 of
// it.
inline constexpr int kTopExponent = 14;

constexpr KVANTA_DEVICE float PowerOfTwo(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent < -126 ? 0 : exponent + 127) << 23U);
}
// floor(log2 |x|) of a normal number; -127 for zero and subnormals, 128 for infinity and NaN.
KVANTA_DEVICE int ExponentOf(float x) {
  return static_cast<int>((std::bit_cast<uint32_t>(x) >> 23U) & 0xffU) - 127;
}

// Blocks of 32 channels in a head.
constexpr KVANTA_DEVICE int BlocksOf(int head_dim) {
  return (head_dim + 31) / 32;
}
// Operand bytes in shared memory: two 16-channel products per block, one to three terms.
constexpr KVANTA_DEVICE int QueryBytes(int terms, int head_dim) {
  return terms * 2 * BlocksOf(head_dim) * kWarp * 16;
}
KVANTA_DEVICE int QueryAt(int term, int step, int head_dim, int lane) {
  return ((term * 2 * BlocksOf(head_dim) + step) * kWarp + lane) * 16;
}

struct QueryRows {
  static constexpr KVANTA_DEVICE int RowBytes(int head_dim) { return 4 * 32 * BlocksOf(head_dim); }

  // Loads the tile's rows to shared memory, all f32: `rows` [16][head_dim], zeros beyond the tile; `scales` [16],
  // powers of two (value = operand * scale); `bias` [16], <q, mean>; `sums` [16] of the transformed rows; `unquantized`
  // [16][unquantized_dim], the channels for K's unquantized ones. One row per warp at a time.
  template <bool kHasUnquantized>
  static KVANTA_DEVICE void Load(const AttentionParams& params, const QueryTile& tile, int head_dim, int rows,
                                 int scales, int bias, int sums, int unquantized) {
    const int lane = ThreadIndex() % kWarp;
    const int count = tile.tokens * tile.heads;
    for (int r = ThreadIndex() / kWarp; r < kQueryRows; r += kAttendWarps) {
      const int at = rows + r * RowBytes(head_dim);
      const int head = tile.first_head + r % tile.heads;
      const float* q = params.q + (tile.row + r / tile.heads) * params.q_stride +
                       int64_t{head} * (kHasUnquantized ? params.key_dim : head_dim);
      float dot = 0;
      uint32_t largest = 0;
      const auto magnitude = [](float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffU; };
      for (int c = lane; c < head_dim; c += kWarp) {
        const float x = r < count ? q[c] : 0.0F;
        if (params.k_mean != nullptr) dot = MultiplyAdd(x, params.k_mean[tile.kv_head * head_dim + c], dot);
        StoreShared(at + 4 * c, x);
      }
      SyncWarp();
      if (kHasUnquantized && params.unquantized_dim != 0) {
        const int32_t* outliers =
            params.outliers != nullptr ? params.outliers + tile.kv_head * params.unquantized_dim : nullptr;
        for (int i = lane; i < params.unquantized_dim; i += kWarp) {
          const float x = r < count ? q[outliers != nullptr ? outliers[i] : head_dim + i] : 0.0F;
          StoreShared(unquantized + r * RowBytes(params.unquantized_dim) + 4 * i, x);
          if (outliers != nullptr) {
            StoreShared(at + 4 * outliers[i], 0.0F);
          } else {  // rotated channels share the row's scale
            largest = magnitude(x) > largest ? magnitude(x) : largest;
          }
        }
        SyncWarp();
      }
      if (params.k_hadamard) HadamardRow(at, head_dim, params.hadamard_block, params.hadamard_norm, lane);
      if (params.query_matrices != nullptr) {
        MultiplyRow(at, params.query_matrices + int64_t{tile.kv_head} * head_dim * formats::MatrixStride(head_dim),
                    head_dim, lane);
      }
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
      if (exponent < -100) exponent = -100;  // keeps both powers normal
      if (exponent > 100) exponent = 100;
      if (lane == 0) {
        StoreShared(scales + 4 * r, PowerOfTwo(exponent - kTopExponent));
        StoreShared(bias + 4 * r, dot);
        StoreShared(sums + 4 * r, sum);
      }
    }
  }

  // Packs these rows as operands for keys of KvType at `operands`, by all warps; needs a block barrier before and
  // after.
  template <class KvType>
  static KVANTA_DEVICE void Pack(int head_dim, int rows, int scales, int operands) {
    const int lane = ThreadIndex() % kWarp;
    for (int step = ThreadIndex() / kWarp; step < 2 * BlocksOf(head_dim); step += kAttendWarps) {
      Vec4 terms[KvType::kTerms];
      KVANTA_UNROLL
      for (int word = 0; word < 4; ++word) {  // rows g, g + 8 of pair 0, then of pair 1
        const int row = lane / 4 + word % 2 * 8;
        const float scale = KvType::kBf16 ? 1.0F : 1.0F / LoadShared<float>(scales + 4 * row);
        float x[2];
        KVANTA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int pair = step % 2 * 2 + word / 2;
          const int channel = step / 2 * 32 + KeyOperand<KvType>::Channel(pair, half, lane % 4);
          x[half] =
              channel < head_dim ? LoadShared<float>(rows + row * RowBytes(head_dim) + 4 * channel) * scale : 0.0F;
        }
        terms[0].word[word] = KvType::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        KVANTA_UNROLL
        for (int term = 1; term < KvType::kTerms; ++term) {
          x[0] -= std::bit_cast<float>(terms[term - 1].word[word] << 16U);
          x[1] -= std::bit_cast<float>(terms[term - 1].word[word] & 0xffff0000U);
          terms[term].word[word] = PackBf16(x[0], x[1]);
        }
      }
      for (int term = 0; term < KvType::kTerms; ++term) {
        StoreShared(operands + QueryAt(term, step, head_dim, lane), terms[term]);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
