// A tile's query rows as tensor-core operands in shared memory: transformed, scaled by the row's largest value, in the
// channel order of the key codes. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/codes.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/matrix_rows.h"
#include "kernels/attention/cuda/trellis_codes.h"

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
// Operand bytes in shared memory: two 16-channel products per block of 32 channels, one to three terms.
constexpr KVANTA_DEVICE int QueryBytes(int terms, int row_tiles, int head_dim) {
  return terms * row_tiles * BlocksOf(head_dim) * kWarp * 16;
}
// The B operands of a block's two products.
template <int kRowTiles>
KVANTA_DEVICE int QueryAt(int term, int row_tile, int block, int head_dim, int lane) {
  return (((term * kRowTiles + row_tile) * BlocksOf(head_dim) + block) * kWarp + lane) * 16;
}

// Operands of 16 rows on M for the products of warpgroups: those of 16 channels after another.
struct QueriesOnM {
  int base;

  static KVANTA_DEVICE int At(int term, int step, int head_dim, int lane) {
    return ((term * 2 * BlocksOf(head_dim) + step) * kWarp + lane) * 16;
  }
  KVANTA_DEVICE Vec4 Load(int term, int step, int head_dim, int lane) const {
    return LoadShared<Vec4>(base + At(term, step, head_dim, lane));
  }
};

// The next term of two values, which keep the rest.
template <class KvType>
KVANTA_DEVICE uint32_t NextTerm(float (&x)[2]) {
  const uint32_t pair = KvType::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
  if constexpr (KvType::kTerms > 1) {
    x[0] -= std::bit_cast<float>(pair << 16U);
    x[1] -= std::bit_cast<float>(pair & 0xffff0000U);
  }
  return pair;
}

// The two channels of a block that are pair `pair` of the lane's operands. value_of(channel): in the head.
template <class KvType, class ValueOf>
KVANTA_DEVICE void ChannelsOfPair(int block, int pair, int head_dim, int t, ValueOf value_of, float (&x)[2]) {
  KVANTA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int channel = 32 * block + KeyOperand<KvType>::Channel(pair, half, t);
    x[half] = channel < head_dim ? value_of(channel) : 0.0F;
  }
}

// Query rows in global memory, of layers that do not transform them: the operands that QueryRows::Pack makes, for rows
// without a scale.
template <class KvType>
struct QueryRowAddresses {
  static_assert(KvType::kBf16);
  const float* q;
  int offsets;  // in shared memory: int64 of each row, -1: zeros

  KVANTA_DEVICE Vec4 Load(int term, int row_tile, int block, int head_dim, int lane) const {
    const auto offset = LoadShared<int64_t>(offsets + 8 * (kRowsPerMma * row_tile + lane / 4));
    Vec4 operand;
    KVANTA_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      float x[2];
      ChannelsOfPair<KvType>(
          block, pair, head_dim, lane % 4, [&](int channel) { return offset >= 0 ? q[offset + channel] : 0.0F; }, x);
      for (int i = 0; i <= term; ++i) operand.word[pair] = NextTerm<KvType>(x);
    }
    return operand;
  }
};

// The B operands of a block's two products.
template <int kRowTiles>
KVANTA_DEVICE Vec4 LoadQueries(int queries, int term, int row_tile, int block, int head_dim, int lane) {
  return LoadShared<Vec4>(queries + QueryAt<kRowTiles>(term, row_tile, block, head_dim, lane));
}
template <int kRowTiles>
KVANTA_DEVICE Vec4 LoadQueries(const QueriesOnM& queries, int term, int row_tile, int block, int head_dim, int lane) {
  Vec4 operands;
  KVANTA_UNROLL
  for (int step = 0; step < 2; ++step) {
    const Vec4 on_m = queries.Load(term, 2 * block + step, head_dim, lane);
    operands.word[2 * step] = on_m.word[row_tile];
    operands.word[2 * step + 1] = on_m.word[2 + row_tile];
  }
  return operands;
}
template <int kRowTiles, class KvType>
KVANTA_DEVICE Vec4 LoadQueries(const QueryRowAddresses<KvType>& queries, int term, int row_tile, int block,
                               int head_dim, int lane) {
  return queries.Load(term, row_tile, block, head_dim, lane);
}

struct QueryRows {
  static constexpr KVANTA_DEVICE int RowBytes(int head_dim) { return 4 * 32 * BlocksOf(head_dim); }

  // Loads R = 8 kRowTiles rows of the tile to shared memory, all f32: `rows` [R][head_dim], zeros beyond the tile;
  // `scales` [R], powers of two (value = operand * scale); `bias` [R], <q, mean>; `sums` [R] of the transformed rows;
  // `unquantized` [R][unquantized_dim], the channels for K's unquantized ones. One row per warp at a time.
  template <int kRowTiles, bool kHasUnquantized>
  static KVANTA_DEVICE void Load(const AttentionParams& params, const QueryTile& tile, int head_dim, int rows,
                                 int scales, int bias, int sums, int unquantized, int warps = kAttendWarps) {
    const int lane = ThreadIndex() % kWarp;
    const int count = tile.tokens * tile.heads;
    for (int r = ThreadIndex() / kWarp; r < kRowTiles * kRowsPerMma; r += warps) {
      const int at = rows + r * RowBytes(head_dim);
      const int head = tile.first_head + r % tile.heads;
      const float* q = params.q + (tile.row + r / tile.heads) * params.q_stride +
                       int64_t{head} * (kHasUnquantized ? params.key_dim : head_dim);
      if (r >= count) {
        for (int c = lane; c < head_dim; c += kWarp) StoreShared(at + 4 * c, 0.0F);
        if (kHasUnquantized) {
          const int to = unquantized + r * RowBytes(params.unquantized_dim);
          for (int i = lane; i < params.unquantized_dim; i += kWarp) StoreShared(to + 4 * i, 0.0F);
        }
        if (lane == 0) {
          StoreShared(scales + 4 * r, 1.0F);
          StoreShared(bias + 4 * r, 0.0F);
          StoreShared(sums + 4 * r, 0.0F);
        }
        continue;
      }
      float dot = 0;
      uint32_t largest = 0;
      const auto magnitude = [](float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffffU; };
      for (int c = lane; c < head_dim; c += kWarp) {
        const float x = q[c];
        if (params.k_mean != nullptr) dot = MultiplyAdd(x, params.k_mean[tile.kv_head * head_dim + c], dot);
        StoreShared(at + 4 * c, x);
      }
      SyncWarp();
      if (kHasUnquantized && params.unquantized_dim != 0) {
        const int32_t* outliers =
            params.outliers != nullptr ? params.outliers + tile.kv_head * params.unquantized_dim : nullptr;
        for (int i = lane; i < params.unquantized_dim; i += kWarp) {
          const float x = q[outliers != nullptr ? outliers[i] : head_dim + i];
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

  // Packs these rows as operands for keys of KvType at `operands`, by all warps: as row tiles [first_tile, first_tile +
  // kRowTiles) of kAllTiles. Needs a block barrier before and after. kOnM: as QueriesOnM.
  template <class KvType, int kRowTiles, bool kOnM = false, int kAllTiles = kRowTiles>
  static KVANTA_DEVICE void Pack(int head_dim, int rows, int scales, int operands, int first_tile = 0,
                                 int warps = kAttendWarps) {
    const int lane = ThreadIndex() % kWarp;
    const int blocks = BlocksOf(head_dim);
    for (int item = ThreadIndex() / kWarp; item < kRowTiles * blocks; item += warps) {
      const int row_tile = item / blocks;
      const int block = item % blocks;
      const int row = kRowsPerMma * row_tile + lane / 4;
      const float scale = KvType::kBf16 ? 1.0F : 1.0F / LoadShared<float>(scales + 4 * row);
      Vec4 terms[KvType::kTerms];
      KVANTA_UNROLL
      for (int pair = 0; pair < 4; ++pair) {
        float x[2];
        ChannelsOfPair<KvType>(
            block, pair, head_dim, lane % 4,
            [&](int channel) { return LoadShared<float>(rows + row * RowBytes(head_dim) + 4 * channel) * scale; }, x);
        KVANTA_UNROLL
        for (int term = 0; term < KvType::kTerms; ++term) terms[term].word[pair] = NextTerm<KvType>(x);
      }
      for (int term = 0; term < KvType::kTerms; ++term) {
        if constexpr (kOnM) {
          for (int i = 0; i < 4; ++i) {
            const int at = QueriesOnM::At(term, 2 * block + i / 2, head_dim, lane) + 4 * (i % 2 * 2 + row_tile);
            StoreShared(operands + at, terms[term].word[i]);
          }
        } else {
          StoreShared(operands + QueryAt<kAllTiles>(term, first_tile + row_tile, block, head_dim, lane), terms[term]);
        }
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
