// Conversion of codes to tensor-core operands, in registers. Include the primitives first.
//
// A chunk is 32 tokens of a page, in the CPU's cell layout (formats/cell_layout.h). The order of tokens and channels
// within a matrix product is free, so each lane loads whole vectors and no shuffles are needed:
//
//   keys     lane (g, t) = (lane / 4, lane % 4): 4-byte units of tokens 4 g .. 4 g + 3, of a block of 32 channels those
//            of t. Rows g and g + 8 of tile i are tokens 4 g + 2 i and 4 g + 2 i + 1; KeyOperand::Channel gives the
//            order of channels.
//   values   lane (g, t): of a block of 32 channels, tokens 8 t .. 8 t + 7 of channels 4 g .. 4 g + 3. Rows g and g + 8
//            of tile i are channels 4 g + 2 i and 4 g + 2 i + 1; pair j of a product's steps is tokens (8 t + j,
//            8 t + 4 + j), as in the transposed result of K Q^T.
//
// Below 8 bits a lane has 8 channels of a key, whatever the width of a bit section: fields of 4, 2 and 1 bits combine
// by shifts (formats/element_type.h), and lanes that share a 4-byte unit of a narrow section load it redundantly.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cuda/kv_types.h"

namespace kvanta::kernels::cuda {

using formats::ElementType;

template <bool kBf16>
KVANTA_DEVICE void Mma(float (&c)[4], const Vec4& a, uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    MmaBf16(c, a, b0, b1);
  } else {
    MmaF16(c, a, b0, b1);
  }
}

// E4M3 to f16 without a conversion instruction: the bits as f16 are the value times 2^-8; the one code above 448 is
// NaN.
KVANTA_DEVICE uint32_t E4m3ToF16Emulated(uint32_t bytes) {
  const uint32_t spread = PermuteBytes(bytes, 0, 0x1404);  // each byte in the upper half of 16 bits
  const uint32_t magnitude = (spread & 0x7f007f00U) >> 1U;
  uint32_t pair = MultiplyF16(magnitude | (spread & 0x80008000U), 0x5c005c00U);
  if ((magnitude & 0x00003f80U) == 0x00003f80U) pair |= 0x00007fffU;
  if ((magnitude & 0x3f800000U) == 0x3f800000U) pair |= 0x7fff0000U;
  return pair;
}
KVANTA_DEVICE uint32_t E4m3Pair(uint32_t bytes) {
  return kConvertsE4m3 ? E4m3ToF16(bytes) : E4m3ToF16Emulated(bytes);
}

// Nibble kNibble of each 16 bits of `word` as f16: its level (formats::Levels), or its value / kE2m1Unit for E2M1.
template <ElementType kElementType, int kNibble>
KVANTA_DEVICE uint32_t NibblePair(uint32_t word) {
  if constexpr (kElementType == ElementType::kE2M1) {
    constexpr unsigned kShift = 4U * kNibble;
    const uint32_t sign = (kShift == 12 ? word : word << (12U - kShift)) & 0x80008000U;
    const uint32_t magnitude = (kShift == 12 ? word >> 3U : word << (9U - kShift)) & 0x0e000e00U;
    return sign | magnitude;
  } else {
    // 1024 + field or 1024 + 16 field, minus the bias: exact. Levels are field - 8 (signed) or field.
    constexpr bool kSigned = kElementType == ElementType::kInt4;
    const uint32_t moved = kNibble >= 2 ? word >> 8U : word;
    if constexpr (kNibble % 2 == 0) {
      const uint32_t field = AndXor(moved, 0x000f000fU, 0x64006400U);
      return MultiplyAddF16(field, 0x3c003c00U, kSigned ? 0xe408e408U : 0xe400e400U);  // - 1032 or - 1024
    } else {
      const uint32_t field = AndXor(moved, 0x00f000f0U, 0x64006400U);
      return MultiplyAddF16(field, 0x2c002c00U, kSigned ? 0xd480d480U : 0xd400d400U);  // / 16, - 72 or - 64
    }
  }
}

// Two's complement bytes in the low half of each 16 bits, as f16.
KVANTA_DEVICE uint32_t Int8Pair(uint32_t bytes) {
  const uint32_t offset = AndXor(bytes, 0x00ff00ffU, 0x64806480U);  // 1024 + 128 + code
  return MultiplyAddF16(offset, 0x3c003c00U, 0xe480e480U);          // - 1152
}

// E5M2 to f16: its bits are the upper byte of an f16.
KVANTA_DEVICE uint32_t E5m2Pair(uint32_t low_halves) {
  return (low_halves & 0x00ff00ffU) << 8U;
}

// field - offset in both halves as f16, exactly.
KVANTA_DEVICE uint32_t FieldPair(uint32_t fields, int offset) {
  const uint32_t bias = (0xe400U + static_cast<uint32_t>(offset)) * 0x00010001U;  // - 1024 - offset
  return MultiplyAddF16(fields | 0x64006400U, 0x3c003c00U, bias);
}

// E3M2 fields in both halves as f16: their values / kE3m2Unit, subnormal ones included.
KVANTA_DEVICE uint32_t E3m2Pair(uint32_t fields) {
  return ((fields & 0x00200020U) << 10U) | ((fields & 0x001f001fU) << 8U);
}

// Four Lloyd-Max levels from `first` on, as bytes.
template <ElementType kElementType>
constexpr uint32_t LevelWord(int first) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= uint32_t{static_cast<uint8_t>(formats::Levels(kElementType).level[first + i])}
            << static_cast<unsigned>(8 * i);
  }
  return word;
}
// Lloyd-Max levels of the 3- or 4-bit fields in both halves, as f16.
KVANTA_DEVICE uint32_t LloydPair(uint32_t fields, bool has_4_bits) {
  const uint32_t selector = (fields & 0x7U) | ((fields >> 8U) & 0x700U);  // bytes 0 and 2
  if (!has_4_bits) {
    constexpr uint32_t kLow = LevelWord<ElementType::kLloyd3>(0);
    constexpr uint32_t kHigh = LevelWord<ElementType::kLloyd3>(4);
    return Int8Pair(PermuteBytes(kLow, kHigh, selector));
  }
  constexpr uint32_t kWords[4] = {LevelWord<ElementType::kLloyd4>(0), LevelWord<ElementType::kLloyd4>(4),
                                  LevelWord<ElementType::kLloyd4>(8), LevelWord<ElementType::kLloyd4>(12)};
  const uint32_t below = PermuteBytes(kWords[0], kWords[1], selector);
  const uint32_t above = PermuteBytes(kWords[2], kWords[3], selector);
  const uint32_t mask = ((fields & 0x00080008U) >> 3U) * 0xffU;
  return Int8Pair((below & ~mask) | (above & mask));
}

// Term `term` (0 to 2) of two f32 split into three bf16 terms each: exact, since bits are truncated, not rounded.
KVANTA_DEVICE uint32_t TermPair(uint32_t first, uint32_t second, int term) {
  KVANTA_UNROLL
  for (int i = 0; i < term; ++i) {
    const auto rest = [](uint32_t bits) {
      return std::bit_cast<uint32_t>(std::bit_cast<float>(bits) - std::bit_cast<float>(bits & 0xffff0000U));
    };
    first = rest(first);
    second = rest(second);
  }
  return PermuteBytes(first, second, 0x7632);
}

// Position of 8 channels from `channel` on in a section of `bits` bits: 4-byte unit, and shift in it.
struct FieldPosition {
  int unit;
  int shift;
};
KVANTA_DEVICE FieldPosition FieldPositionOf(int bits, int channel) {
  const int bytes = channel / 8 * bits;
  return {bytes / 4, 2 * (bytes % 4)};
}

// ---- keys: a block of 32 channels is 4 channel pairs per t, two per 16-channel product

template <class KvType>
struct KeyOperand {
  static constexpr int kLoads = KvType::kSubbyte ? 1 : KvType::kBits / 4;
  struct Raw {
    Vec4 low[kLoads];  // units of tokens 4 g .. 4 g + 3
    Vec4 high;         // fields of the second bit section
  };

  // Channel of half `half` of pair `pair` of a block. Both halves are in one 4-byte unit, except with f32 codes.
  static KVANTA_DEVICE int Channel(int pair, int half, int t) {
    if constexpr (KvType::kSubbyte) return 8 * t + pair + 4 * half;
    if constexpr (KvType::kBits == 32) return 4 * (2 * pair + half) + t;
    if constexpr (KvType::kBits == 16) return 2 * (4 * pair + t) + half;
    const int first = 4 * (4 * (pair / 2) + t);
    return first + (KvType::kDecodeKind == DecodeKind::kE4M3 ? 2 * (pair % 2) + half : pair % 2 + 2 * half);
  }

  // `lane_line`: offset of the lane's tokens in a unit's line (4 (g % 4) bytes into token group g / 4 of 16). kByPairs:
  // loads of two tokens, which are halves of operands as they are; the compiler moves four for each product.
  template <bool kByPairs = false, class Cell>
  static KVANTA_DEVICE void Load(const KvType& type, const Cell& cell, int head_dim, int block, int t, int lane_line,
                                 Raw& raw) {
    if constexpr (KvType::kSubbyte) {
      const int channel = 32 * block + 8 * t;
      raw.low[0] = raw.high = {};
      if (channel >= head_dim) return;
      if constexpr (KvType::kFixed && formats::CodeBits(KvType::kElementType) == 4) {
        raw.low[0] = cell.Codes4(lane_line + t * 64, block * 256);
        return;
      }
      raw.low[0] = cell.Codes4(lane_line + FieldPositionOf(type.LowBits(), channel).unit * 64, 0);
      if (type.HighBits() != 0) {
        const int unit = head_dim * type.LowBits() / 32 + FieldPositionOf(type.HighBits(), channel).unit;
        raw.high = cell.Codes4(lane_line + unit * 64, 0);
      }
    } else {
      KVANTA_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        const int first_unit = 4 * (kLoads * block + n);
        const bool inside = (first_unit + t) * (32 / KvType::kBits) < head_dim;
        raw.low[n] = {};
        if (!inside) continue;
        if constexpr (kByPairs) {
          const Vec2 first = cell.Codes2(lane_line + t * 64, first_unit * 64);
          const Vec2 second = cell.Codes2(lane_line + t * 64, first_unit * 64 + 8);
          raw.low[n] = {{first.word[0], first.word[1], second.word[0], second.word[1]}};
        } else {
          raw.low[n] = cell.Codes4(lane_line + t * 64, first_unit * 64);
        }
      }
    }
  }

  // Pair `kPair` of token 4 g + j; term `term` of f32 codes.
  template <int kPair>
  static KVANTA_DEVICE uint32_t Pair(const KvType& type, const Raw& raw, int j, int t, int term) {
    if constexpr (KvType::kBits == 32) {
      return TermPair(raw.low[2 * kPair].word[j], raw.low[2 * kPair + 1].word[j], term);
    } else if constexpr (KvType::kBits == 16) {
      return raw.low[kPair].word[j];
    } else if constexpr (KvType::kBits == 8) {
      const uint32_t unit = raw.low[kPair / 2].word[j];
      if constexpr (KvType::kDecodeKind == DecodeKind::kE4M3) return E4m3Pair(kPair % 2 == 0 ? unit : unit >> 16U);
      const uint32_t halves = kPair % 2 == 0 ? unit : unit >> 8U;
      return KvType::kDecodeKind == DecodeKind::kInt8 ? Int8Pair(halves) : E5m2Pair(halves);
    } else if constexpr (formats::CodeBits(KvType::kElementType) == 4) {
      return NibblePair<KvType::kElementType, kPair>(raw.low[0].word[j]);
    } else {
      const auto fields = [&](uint32_t word, int bits, int shift) {
        return (word >> static_cast<unsigned>(shift + bits * (kPair % 2) + 8 * (kPair / 2))) &
               (((1U << static_cast<unsigned>(bits)) - 1U) * 0x00010001U);
      };
      const int low = type.LowBits();
      uint32_t both = fields(raw.low[0].word[j], low, FieldPositionOf(low, 8 * t).shift);
      if (const int high = type.HighBits(); high != 0) {
        both |= fields(raw.high.word[j], high, FieldPositionOf(high, 8 * t).shift) << static_cast<unsigned>(low);
      }
      if constexpr (KvType::kDecodeKind == DecodeKind::kLloyd) return LloydPair(both, low == 4);
      if constexpr (KvType::kDecodeKind == DecodeKind::kE3M2) return E3m2Pair(both);
      return FieldPair(both, type.Offset());
    }
  }
};

// ---- values: pairs (token j, token 4 + j) of 8 tokens of 4 channels

template <class KvType>
struct ValueOperand {
  static constexpr int kTokens = KvType::kBits == 32 ? 1 : KvType::kBits == 16 ? 2 : 4;  // in a 4-byte unit
  static constexpr int kLoads = 8 / kTokens;                                             // token units
  static constexpr int kLoadWords = KvType::kSubbyte ? 2 : 4;                            // words of 4 channels
  struct Raw {
    uint32_t low[kLoads][kLoadWords];
    uint32_t high[2][2];
  };

  template <class Cell>
  static KVANTA_DEVICE void Load(const KvType& type, const Cell& cell, int head_dim, int block, int lane, Raw& raw) {
    const int channel = 32 * block + lane / 4 * 4;
    const int first = cell.WrapToken(lane % 4 * 8) / kTokens;  // token unit
    raw = {};
    if (channel >= head_dim) return;
    if constexpr (KvType::kFixed && formats::CodeBits(KvType::kElementType) == 4) {
      const int line = 2 * head_dim;  // bytes of 4 tokens
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        const Vec2 vec = cell.Codes2(first * line + lane / 4 * 8, i * line + block * 64);
        raw.low[i][0] = vec.word[0];
        raw.low[i][1] = vec.word[1];
      }
    } else if constexpr (KvType::kSubbyte) {
      const int line = head_dim * (type.LowBits() + type.HighBits()) / 2;  // bytes of 4 tokens
      const auto load = [&](int section, int bits, uint32_t(&to)[2][2]) {
        const int byte = section + 4 * FieldPositionOf(bits, channel).unit + channel % 8 / 2;
        KVANTA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const Vec2 vec = cell.Codes2(first * line + 4 * byte, i * line);
          to[i][0] = vec.word[0];
          to[i][1] = vec.word[1];
        }
      };
      load(0, type.LowBits(), raw.low);
      if (type.HighBits() != 0) load(head_dim * type.LowBits() / 8, type.HighBits(), raw.high);
    } else {
      KVANTA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const Vec4 vec = cell.Codes4(first * head_dim * 4 + lane / 4 * 16, i * head_dim * 4 + block * 128);
        KVANTA_UNROLL
        for (int word = 0; word < 4; ++word) raw.low[i][word] = vec.word[word];
      }
    }
  }

  // The four pairs of channel 4 g + kChannel; term `term` of f32 codes.
  template <int kChannel>
  static KVANTA_DEVICE void Pairs(const KvType& type, const Raw& raw, int g, int term, uint32_t (&pairs)[4]) {
    const auto& w = raw.low;
    if constexpr (KvType::kBits == 32) {
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) pairs[j] = TermPair(w[j][kChannel], w[4 + j][kChannel], term);
    } else if constexpr (KvType::kBits == 16) {
      pairs[0] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x5410);
      pairs[1] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x7632);
      pairs[2] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x5410);
      pairs[3] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x7632);
    } else if constexpr (KvType::kDecodeKind == DecodeKind::kE4M3) {
      const uint32_t low = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x5140);
      const uint32_t high = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x7362);
      pairs[0] = E4m3Pair(low);
      pairs[1] = E4m3Pair(low >> 16U);
      pairs[2] = E4m3Pair(high);
      pairs[3] = E4m3Pair(high >> 16U);
    } else if constexpr (KvType::kBits == 8) {
      const auto pair = [](uint32_t halves) {
        return KvType::kDecodeKind == DecodeKind::kInt8 ? Int8Pair(halves) : E5m2Pair(halves);
      };
      FourPairs(w[0][kChannel], w[1][kChannel], pair, pairs);
    } else if constexpr (formats::CodeBits(KvType::kElementType) == 4) {
      constexpr int kOdd = kChannel % 2;  // the upper nibble of a byte
      const uint32_t low = PermuteBytes(w[0][kChannel / 2], w[1][kChannel / 2], 0x5410);
      const uint32_t high = PermuteBytes(w[0][kChannel / 2], w[1][kChannel / 2], 0x7632);
      pairs[0] = NibblePair<KvType::kElementType, kOdd>(low);
      pairs[1] = NibblePair<KvType::kElementType, 2 + kOdd>(low);
      pairs[2] = NibblePair<KvType::kElementType, kOdd>(high);
      pairs[3] = NibblePair<KvType::kElementType, 2 + kOdd>(high);
    } else {
      const auto fields = [&](uint32_t word, int bits) {
        const int shift = FieldPositionOf(bits, 4 * g).shift + bits * (kChannel % 2);
        return (word >> static_cast<unsigned>(shift)) & (((1U << static_cast<unsigned>(bits)) - 1U) * 0x01010101U);
      };
      uint32_t both[2];
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        both[i] = fields(w[i][kChannel / 2], type.LowBits());
        if (type.HighBits() != 0) {
          both[i] |= fields(raw.high[i][kChannel / 2], type.HighBits()) << static_cast<unsigned>(type.LowBits());
        }
      }
      const auto pair = [&](uint32_t halves) {
        if constexpr (KvType::kDecodeKind == DecodeKind::kE3M2) return E3m2Pair(halves);
        return FieldPair(halves & 0x00ff00ffU, type.Offset());
      };
      FourPairs(both[0], both[1], pair, pairs);
    }
  }

 private:
  // Pairs from the bytes of tokens 0 to 3 and 4 to 7. `pair` converts the low byte of each 16 bits; the high byte is
  // arbitrary.
  template <class Pair>
  static KVANTA_DEVICE void FourPairs(uint32_t first, uint32_t second, Pair pair, uint32_t (&pairs)[4]) {
    const uint32_t low = PermuteBytes(first, second, 0x5410);
    const uint32_t high = PermuteBytes(first, second, 0x7632);
    pairs[0] = pair(low);
    pairs[1] = pair(low >> 8U);
    pairs[2] = pair(high);
    pairs[3] = pair(high >> 8U);
  }
};

}  // namespace kvanta::kernels::cuda
