// A chunk of a K or V cell in its page, and its scales. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/codes.h"
#include "kernels/attention/cuda/trellis_codes.h"

namespace kvanta::kernels::cuda {

inline constexpr uint32_t kF16Pair128 = 0x58005800U;   // 1 / kE4m3ScaleUnit
inline constexpr uint32_t kF16PairHalf = 0x38003800U;  // 1 / kChannelUnit

// Bytes of one row of codes.
template <class KvType>
KVANTA_DEVICE int CodeBytes(const KvType& type, int head_dim) {
  if constexpr (KvType::kSubbyte) return head_dim * (type.LowBits() + type.HighBits()) / 8;
  return head_dim * KvType::kBits / 8;
}

// A chunk read directly from its page. Scale accessors take a token index in the chunk.
struct PageCell {
  static constexpr bool kIsStaged = false;
  static constexpr bool kIsDecoded = false;
  const uint8_t* cell;
  const CellOffsets& offsets;
  const uint8_t* codes;  // codes of the chunk
  int page_size;
  int first_token;  // first token of the chunk, counted within the page
  int token_mask;   // 31, or 15 for pages of 16 tokens

  KVANTA_DEVICE PageCell(const uint8_t* in_page, const CellOffsets& sections, int row_bytes, int tokens, int first)
      : cell(in_page),
        offsets(sections),
        codes(in_page + sections.codes + first * row_bytes),
        page_size(tokens),
        first_token(first),
        token_mask(tokens < kChunkTokens ? tokens - 1 : kChunkTokens - 1) {}

  // Token index to load from: in a 16-token chunk, lanes beyond its end load the first tokens again.
  KVANTA_DEVICE int WrapToken(int token) const { return token & token_mask; }

  // 16, 8 and 4 bytes of codes at an offset of the lane plus one of the warp (a multiple of 256 bytes for keys).
  KVANTA_DEVICE Vec4 Codes4(int of_lane, int of_warp) const { return LoadVec4(codes + of_lane + of_warp); }
  KVANTA_DEVICE Vec2 Codes2(int of_lane, int of_warp) const { return LoadVec2(codes + of_lane + of_warp); }
  KVANTA_DEVICE uint32_t Codes1(int of_lane, int of_warp) const { return LoadWord(codes + of_lane + of_warp); }
  // fp16 of 4 tokens.
  KVANTA_DEVICE Vec2 BlockScales(int block, int token) const { return LoadF16s(offsets.block_scales, block, token); }
  KVANTA_DEVICE Vec2 BlockOffsets(int block, int token) const { return LoadF16s(offsets.block_offsets, block, token); }
  KVANTA_DEVICE Vec2 TokenScales(int token) const { return LoadF16s(offsets.token_scales, 0, token); }
  KVANTA_DEVICE Vec2 TokenOffsets(int token) const { return LoadF16s(offsets.token_offsets, 0, token); }
  // f32 of 4 tokens.
  KVANTA_DEVICE Vec4 BlockFloats(int block, int token) const {
    return LoadVec4(cell + offsets.block_scales + (block * page_size + first_token + WrapToken(token)) * 4);
  }
  KVANTA_DEVICE Vec4 TokenFloats(int token) const {
    return LoadVec4(cell + offsets.token_scales + (first_token + WrapToken(token)) * 4);
  }
  // Bytes of 8 and of 4 tokens.
  KVANTA_DEVICE Vec2 BlockBytes8(int block, int token) const {
    return LoadVec2(cell + offsets.block_scales + block * page_size + first_token + WrapToken(token));
  }
  KVANTA_DEVICE uint32_t BlockBytes4(int block, int token) const {
    return LoadWord(cell + offsets.block_scales + block * page_size + first_token + WrapToken(token));
  }
  // fp16 of 8 channels.
  KVANTA_DEVICE Vec4 ChannelScales(int head_dim, int channel) const {
    return LoadVec4(cell + offsets.channel_scales + (first_token / kChunkTokens * head_dim + channel) * 2);
  }
  KVANTA_DEVICE Vec4 ChannelOffsets(int head_dim, int channel) const {
    return LoadVec4(cell + offsets.channel_offsets + (first_token / kChunkTokens * head_dim + channel) * 2);
  }

 private:
  KVANTA_DEVICE Vec2 LoadF16s(int64_t section, int block, int token) const {
    return LoadVec2(cell + section + (block * page_size + first_token + WrapToken(token)) * 2);
  }
};

// ---- scales of tokens 4 g to 4 g + 3 in f32

KVANTA_DEVICE void F16ToFloats(const Vec2& vec, float (&values)[4]) {
  KVANTA_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = F16ToFloat(static_cast<uint16_t>(vec.word[i / 2] >> (16U * (i % 2U))));
}
KVANTA_DEVICE void BitsToFloats(const Vec4& vec, float (&values)[4]) {
  KVANTA_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = std::bit_cast<float>(vec.word[i]);
}
KVANTA_DEVICE uint32_t ByteOf(uint32_t word, int i) {
  return (word >> (8U * static_cast<unsigned>(i))) & 0xffU;
}
// E8M0 (formats/minifloat.h).
KVANTA_DEVICE float PowerScale(uint32_t byte) {
  return std::bit_cast<float>(byte == 0 ? 0x00400000U : byte << 23U);
}
// Scales of 16 channels of 4 and 8 tokens; zeros beyond head_dim, where codes are zeros, too.
template <class Cell>
KVANTA_DEVICE uint32_t HalfBytes4(const Cell& cell, int head_dim, int half, int token) {
  return 16 * half < head_dim ? cell.BlockBytes4(half, token) : 0;
}
template <class Cell>
KVANTA_DEVICE Vec2 HalfBytes8(const Cell& cell, int head_dim, int half, int token) {
  return 16 * half < head_dim ? cell.BlockBytes8(half, token) : Vec2{};
}

template <class KvType>
KVANTA_DEVICE bool ScalesBlocks(const KvType& type) {
  return HasBlockScales(type.BlockScaling());
}

// Blocks of 32 channels that share a scale.
template <class KvType>
constexpr KVANTA_DEVICE int BlocksPerScale() {
  if constexpr (KvType::kFixed) return KvType::BlockScaling() == BlockScale::kF32 ? kBlocksPerF32Scale : 1;
  return 1;
}

template <class KvType, class Cell>
KVANTA_DEVICE void BlockScales(const KvType& type, const Cell& cell, int head_dim, int block, int g,
                               float (&scales)[4]) {
  if constexpr (Cell::kIsDecoded) {
    BitsToFloats(cell.BlockFloats(block, 4 * g), scales);
  } else if (type.BlockScaling() == BlockScale::kFp16) {
    F16ToFloats(cell.BlockScales(block, 4 * g), scales);
  } else if (type.BlockScaling() == BlockScale::kPower) {
    const uint32_t bytes = cell.BlockBytes4(block, 4 * g);
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) scales[i] = PowerScale(ByteOf(bytes, i));
  } else if (type.BlockScaling() == BlockScale::kPowerHalves) {
    const uint32_t first = HalfBytes4(cell, head_dim, 2 * block, 4 * g);
    const uint32_t second = HalfBytes4(cell, head_dim, 2 * block + 1, 4 * g);
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = ByteOf(first, i);
      const uint32_t b = ByteOf(second, i);
      scales[i] = PowerScale(a > b ? a : b);
    }
  } else if (KvType::kFixed && type.BlockScaling() == BlockScale::kF32) {
    BitsToFloats(cell.BlockFloats(block / kBlocksPerF32Scale, 4 * g), scales);
  } else {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) scales[i] = 1;
  }
}
template <class KvType, class Cell>
KVANTA_DEVICE void TokenScales(const KvType& type, const Cell& cell, int g, float (&scales)[4]) {
  if constexpr (Cell::kIsDecoded) {
    if constexpr (Cell::kScalesTokens) {
      BitsToFloats(cell.TokenFloats(4 * g), scales);
    } else {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) scales[i] = 1;
    }
  } else if (type.TokenScaling() == formats::ScaleType::kFp16) {
    F16ToFloats(cell.TokenScales(4 * g), scales);
  } else if (type.TokenScaling() == formats::ScaleType::kF32) {
    BitsToFloats(cell.TokenFloats(4 * g), scales);
  } else {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) scales[i] = 1;
  }
}

// ---- scales per 16 channels as f16 operands

// 2^14 times the ratio of a half's scale to its block's: E2M1 operands are values times 2^-14.
KVANTA_DEVICE uint32_t HalfFactor(uint32_t own, uint32_t other) {
  const uint32_t less = other > own ? other - own : 0;
  return less < 29 ? (29 - less) << 10U : 0;
}
// Pairs (token j, token 4 + j) of 8 E4M3 scales, times 2^7.
KVANTA_DEVICE void E4m3ScalePairs(const Vec2& bytes, uint32_t (&pairs)[4]) {
  const uint32_t low = PermuteBytes(bytes.word[0], bytes.word[1], 0x5140);
  const uint32_t high = PermuteBytes(bytes.word[0], bytes.word[1], 0x7362);
  pairs[0] = MultiplyF16(E4m3Pair(low), kF16Pair128);
  pairs[1] = MultiplyF16(E4m3Pair(low >> 16U), kF16Pair128);
  pairs[2] = MultiplyF16(E4m3Pair(high), kF16Pair128);
  pairs[3] = MultiplyF16(E4m3Pair(high >> 16U), kF16Pair128);
}

}  // namespace kvanta::kernels::cuda
