// What attention's kernels are made of: a side's cell in a page, its scales, a tile's state, a chunk's view. A unit
// that includes this has included the primitives.
#pragma once

#include <limits>
#include <type_traits>

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/queries.h"

namespace kvanta::kernels::cuda {

inline constexpr float kLog2E = 1.44269504088896340736F;
inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
inline constexpr uint32_t kTwoToThe7 = 0x58005800U;  // 1 / kE4m3ScaleUnit
inline constexpr uint32_t kHalf = 0x38003800U;       // 1 / kChannelUnit

template <bool kBf16>
KVANTA_DEVICE void Mma(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    MmaBf16(c, a, b0, b1);
  } else {
    MmaF16(c, a, b0, b1);
  }
}

// Of a row of codes.
template <class Side>
KVANTA_DEVICE int CodeBytes(const Side& side, int head_dim) {
  if constexpr (Side::kSubbyte) return head_dim * (side.LowBits() + side.HighBits()) / 8;
  return head_dim * Side::kBits / 8;
}

// A chunk of a cell where it lies in its page. Scales of tokens from `token` of the chunk on.
struct PageCell {
  static constexpr bool kIsStaged = false;
  const uint8_t* cell;
  const CellPlace& place;
  const uint8_t* codes;  // of the chunk
  int page_size;
  int slot;
  int last_token;  // of the chunk: 31, or 15, whose lanes for more tokens take the first ones again

  KVANTA_DEVICE PageCell(const uint8_t* in_page, const CellPlace& sections, int row_bytes, int tokens, int first)
      : cell(in_page),
        place(sections),
        codes(in_page + sections.codes + first * row_bytes),
        page_size(tokens),
        slot(first),
        last_token(tokens < kChunkTokens ? tokens - 1 : kChunkTokens - 1) {}

  // Where the tokens from `token` on lie in the chunk.
  KVANTA_DEVICE int Token(int token) const { return token & last_token; }

  KVANTA_DEVICE Vec4 Codes4(int offset) const { return LoadVec4(codes + offset); }
  KVANTA_DEVICE Vec2 Codes2(int offset) const { return LoadVec2(codes + offset); }
  // fp16, of 8 tokens.
  KVANTA_DEVICE Vec4 BlockScales(int block, int token) const { return Halves(place.block_scales, block, token); }
  KVANTA_DEVICE Vec4 BlockOffsets(int block, int token) const { return Halves(place.block_offsets, block, token); }
  KVANTA_DEVICE Vec4 TokenScales(int token) const { return Halves(place.token_scales, 0, token); }
  KVANTA_DEVICE Vec4 TokenOffsets(int token) const { return Halves(place.token_offsets, 0, token); }
  // f32, of 4 tokens.
  KVANTA_DEVICE Vec4 BlockFloats(int block, int token) const {
    return LoadVec4(cell + place.block_scales + (block * page_size + slot + Token(token)) * 4);
  }
  KVANTA_DEVICE Vec4 TokenFloats(int token) const {
    return LoadVec4(cell + place.token_scales + (slot + Token(token)) * 4);
  }
  // Bytes, of 8 and of 4 tokens.
  KVANTA_DEVICE Vec2 BlockBytes8(int block, int token) const {
    return LoadVec2(cell + place.block_scales + block * page_size + slot + Token(token));
  }
  KVANTA_DEVICE uint32_t BlockBytes4(int block, int token) const {
    return LoadWord(cell + place.block_scales + block * page_size + slot + Token(token));
  }
  // fp16, of 8 channels.
  KVANTA_DEVICE Vec4 ChannelScales(int head_dim, int channel) const {
    return LoadVec4(cell + place.channel_scales + (slot / kChunkTokens * head_dim + channel) * 2);
  }
  KVANTA_DEVICE Vec4 ChannelOffsets(int head_dim, int channel) const {
    return LoadVec4(cell + place.channel_offsets + (slot / kChunkTokens * head_dim + channel) * 2);
  }

 private:
  KVANTA_DEVICE Vec4 Halves(int64_t section, int block, int token) const {
    return LoadVec4(cell + section + (block * page_size + slot + Token(token)) * 2);
  }
};

// ---- scales in f32, of tokens 8 t to 8 t + 7

KVANTA_DEVICE void FromHalves(const Vec4& words, float (&values)[8]) {
  KVANTA_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = F16ToFloat(static_cast<uint16_t>(words.word[i / 2] >> (16U * (i % 2U))));
}
// f32 of 8 tokens, from those of 4.
template <class Load>
KVANTA_DEVICE void FromFloats(const Load& load, int t, float (&values)[8]) {
  KVANTA_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Vec4 words = load(8 * t + 4 * half);
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) values[4 * half + i] = std::bit_cast<float>(words.word[i]);
  }
}
KVANTA_DEVICE uint32_t ByteOf(const Vec2& words, int i) {
  return (words.word[i / 4] >> (8U * (static_cast<unsigned>(i) % 4U))) & 0xffU;
}
// E8M0 (formats/minifloat.h).
KVANTA_DEVICE float PowerScale(uint32_t byte) {
  return std::bit_cast<float>(byte == 0 ? 0x00400000U : byte << 23U);
}
// What of a block of 32 channels that lies beyond head_dim is taken to be; its codes are zeros.
template <class Cell>
KVANTA_DEVICE Vec2 HalfBytes8(const Cell& cell, int head_dim, int half, int token) {
  return 16 * half < head_dim ? cell.BlockBytes8(half, token) : Vec2{};
}

template <class Side, class Cell>
KVANTA_DEVICE void BlockScales(const Side& side, const Cell& cell, int head_dim, int block, int t, float (&scales)[8]) {
  if (side.Block() == BlockScale::kFp16) {
    FromHalves(cell.BlockScales(block, 8 * t), scales);
  } else if (side.Block() == BlockScale::kPower) {
    const Vec2 bytes = cell.BlockBytes8(block, 8 * t);
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) scales[i] = PowerScale(ByteOf(bytes, i));
  } else if (side.Block() == BlockScale::kPowerHalves) {
    const Vec2 first = HalfBytes8(cell, head_dim, 2 * block, 8 * t);
    const Vec2 second = HalfBytes8(cell, head_dim, 2 * block + 1, 8 * t);
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t a = ByteOf(first, i);
      const uint32_t b = ByteOf(second, i);
      scales[i] = PowerScale(a > b ? a : b);
    }
  } else if (Side::kFixed && side.Block() == BlockScale::kF32) {
    FromFloats([&](int token) { return cell.BlockFloats(block / kBlocksOfF32, token); }, t, scales);
  } else {
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) scales[i] = 1;
  }
}
template <class Side>
KVANTA_DEVICE bool ScalesBlocks(const Side& side) {
  return side.Block() != BlockScale::kNone && side.Block() != BlockScale::kE4m3Halves;
}

template <class Side, class Cell>
KVANTA_DEVICE void TokenScales(const Side& side, const Cell& cell, int t, float (&scales)[8]) {
  if (side.Token() == formats::ScaleType::kFp16) {
    FromHalves(cell.TokenScales(8 * t), scales);
  } else if (side.Token() == formats::ScaleType::kF32) {
    FromFloats([&](int token) { return cell.TokenFloats(token); }, t, scales);
  } else {
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) scales[i] = 1;
  }
}

// ---- scales of 16 channels as f16 operands

// 2^14 times what a half's scale is of its block's: E2M1's operands are 2^-14 of their values.
KVANTA_DEVICE uint32_t HalfFactor(uint32_t own, uint32_t other) {
  const uint32_t less = other > own ? other - own : 0;
  return less < 29 ? (29 - less) << 10U : 0;
}
// Pairs (token j, token 4 + j) of 8 E4M3 scales, times 2^7.
KVANTA_DEVICE void E4m3ScalePairs(const Vec2& bytes, uint32_t (&pairs)[4]) {
  const uint32_t low = PermuteBytes(bytes.word[0], bytes.word[1], 0x5140);
  const uint32_t high = PermuteBytes(bytes.word[0], bytes.word[1], 0x7362);
  pairs[0] = MultiplyF16(E4m3Pair(low), kTwoToThe7);
  pairs[1] = MultiplyF16(E4m3Pair(low >> 16U), kTwoToThe7);
  pairs[2] = MultiplyF16(E4m3Pair(high), kTwoToThe7);
  pairs[3] = MultiplyF16(E4m3Pair(high >> 16U), kTwoToThe7);
}

// ---- a tile

// A lane's part of a tile over some tokens: rows g and g + 8 (index 0 and 1).
struct TileRows {
  float max_value[2];  // of logits, in powers of 2
  float sum[2];        // this lane's tokens' weights
  int exponent[2];     // outputs are in units of 2^(exponent - kTopExponent)
};

// Below any fp16 scale; of smaller powers of two, weights lose bits. bf16 values are multiplied by weights as they are:
// a cell of them has no scale to follow, and beside other cells it takes their exponent.
inline constexpr int kMinExponent = -40;
inline constexpr int kGreatestExponent = 126;

// Of no tokens yet. tokens: as of ViewOf.
KVANTA_DEVICE void BeginRows(const QueryTile& tile, DecodeKind values, int lane, TileRows& rows, int (&tokens)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    tokens[row] = (lane / 4 + 8 * row) / tile.heads;
    rows.max_value[row] = kMinusInfinity;
    rows.sum[row] = 0;
    rows.exponent[row] = values == DecodeKind::kBf16 || values == DecodeKind::kF32 ? kTopExponent : kMinExponent;
  }
}

// Its outputs, 4 tiles a block of 32 channels: tile i of block b is channels 32 b + 8 t + i and + 4 + i, rows g and g
// + 8. In registers, by code that is unrolled,
template <int kBlocks>
struct RegisterOutputs {
  static constexpr bool kUnrolled = true;
  static constexpr int kMaxBlocks = kBlocks;
  float out[kBlocks][4][4];

  KVANTA_DEVICE void Take(int block, float (&to)[4][4]) const {
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) to[i / 4][i % 4] = out[block][i / 4][i % 4];
  }
  KVANTA_DEVICE void Put(int block, const float (&from)[4][4]) {
    KVANTA_UNROLL
    for (int i = 0; i < 16; ++i) out[block][i / 4][i % 4] = from[i / 4][i % 4];
  }
};
// or in shared memory, where the warp's results will be: one code for any number of blocks, and few registers.
struct SharedOutputs {
  static constexpr bool kUnrolled = false;
  static constexpr int kMaxBlocks = 8;
  int base;  // of the lane: 16 bytes of each tile, 512 bytes a tile

  KVANTA_DEVICE void Take(int block, float (&to)[4][4]) const {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto words = LoadShared<Vec4>(base + (4 * block + i) * kTileBytes);
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) to[i][e] = std::bit_cast<float>(words.word[e]);
    }
  }
  KVANTA_DEVICE void Put(int block, const float (&from)[4][4]) {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      Vec4 words;
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) words.word[e] = std::bit_cast<uint32_t>(from[i][e]);
      StoreShared(base + (4 * block + i) * kTileBytes, words);
    }
  }
  static constexpr int kTileBytes = 16 * kWarp;
};

// The greatest logit of rows g and g + 8.
KVANTA_DEVICE void Argmaxes(const float (&s)[4][4], float (&argmaxes)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    float max_value = kMinusInfinity;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) max_value = fmaxf(max_value, fmaxf(s[j][2 * row], s[j][2 * row + 1]));
    max_value = fmaxf(max_value, ShuffleXor(max_value, 1));
    argmaxes[row] = fmaxf(max_value, ShuffleXor(max_value, 2));
  }
}

// Weights of the tokens from their logits, and the state brought to the peak of it and of `peaks`. `decay` is what the
// state's sums have to be multiplied by.
KVANTA_DEVICE void Softmax(const float (&argmaxes)[2], float (&s)[4][4], TileRows& state, float (&decay)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    const float max_value = fmaxf(state.max_value[row], argmaxes[row]);
    const float base = max_value == kMinusInfinity ? 0.0F : max_value;
    decay[row] = Exp2(state.max_value[row] - base);
    state.max_value[row] = max_value;
    float sum = 0;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 2 * row; i < 2 * row + 2; ++i) {
        s[j][i] = Exp2(s[j][i] - base);
        sum += s[j][i];
      }
    }
    state.sum[row] = MultiplyAdd(state.sum[row], decay[row], sum);
  }
}

}  // namespace kvanta::kernels::cuda
