// Codes to operands of the tensor cores, in registers. A unit that includes this has included the primitives.
//
// A chunk is 32 tokens of a page. Its cell lies as on the CPU (formats/cell_layout.h), and the order of tokens and
// channels within a product is free, so a lane loads what it needs in whole vectors, and nothing is shuffled:
//
//   keys     lane (g, t) = (lane / 4, lane % 4): 4-byte units of tokens 4 g .. 4 g + 3, of a block of 32 channels those
//            of t. Column g of tile j is token 4 g + j; which channels meet in a product is KeyOperand::Channel.
//   values   lane (g, t): of a block of 32 channels, tokens 8 t .. 8 t + 7 of channels 4 g .. 4 g + 3. Column g of tile
//   i
//            is channel 4 g + i; pair j of a product's steps is tokens (8 t + j, 8 t + 4 + j), as Q K leaves them.
//
// Below 8 bits a lane has 8 channels of a key, whatever the width of a plane: equal fields of 4, 2 and 1 bits meet by
// shifts alone (formats/code.h), and lanes that share a unit of a narrower plane load it several times, from one line.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cuda/kv_types.h"

namespace kvanta::kernels::cuda {

using formats::ElementType;

// E4M3 without an instruction for it: as f16 with the exponent field unshifted a value is itself times 2^-8; the one
// code beyond 448 is NaN.
KVANTA_DEVICE uint32_t E4m3ToF16InSteps(uint32_t bytes) {
  const uint32_t spread = PermuteBytes(bytes, 0, 0x1404);  // each byte in the upper half of its own 16 bits
  const uint32_t magnitude = (spread & 0x7f007f00U) >> 1U;
  uint32_t pair = MultiplyF16(magnitude | (spread & 0x80008000U), 0x5c005c00U);
  if ((magnitude & 0x00003f80U) == 0x00003f80U) pair |= 0x00007fffU;
  if ((magnitude & 0x3f800000U) == 0x3f800000U) pair |= 0x7fff0000U;
  return pair;
}
KVANTA_DEVICE uint32_t E4m3Pair(uint32_t bytes) {
  return kConvertsE4m3 ? E4m3ToF16(bytes) : E4m3ToF16InSteps(bytes);
}

// Nibble i (0 to 3) of each 16 bits of `word` as f16: its level (formats::Levels) / kE2m1Unit where the code is E2M1.
template <ElementType kElementType, int kNibble>
KVANTA_DEVICE uint32_t NibblePair(uint32_t word) {
  if constexpr (kElementType == ElementType::kE2M1) {
    constexpr unsigned kShift = 4U * kNibble;
    const uint32_t sign = (kShift == 12 ? word : word << (12U - kShift)) & 0x80008000U;
    const uint32_t magnitude = (kShift == 12 ? word >> 3U : word << (9U - kShift)) & 0x0e000e00U;
    return sign | magnitude;
  } else {
    // 1024 + field, or 1024 + 16 field, less what is too much: exact. Levels are field - 8, or the field itself.
    constexpr bool kSigned = kElementType == ElementType::kInt4;
    const uint32_t moved = kNibble >= 2 ? word >> 8U : word;
    if constexpr (kNibble % 2 == 0) {
      const uint32_t field = (moved & 0x000f000fU) | 0x64006400U;
      return MultiplyAddF16(field, 0x3c003c00U, kSigned ? 0xe408e408U : 0xe400e400U);  // - 1032 or - 1024
    } else {
      const uint32_t field = (moved & 0x00f000f0U) | 0x64006400U;
      return MultiplyAddF16(field, 0x2c002c00U, kSigned ? 0xd480d480U : 0xd400d400U);  // / 16, - 72 or - 64
    }
  }
}

// Two's complement bytes in the low halves of each 16 bits.
KVANTA_DEVICE uint32_t Int8Pair(uint32_t bytes) {
  const uint32_t offset = ((bytes & 0x00ff00ffU) ^ 0x00800080U) | 0x64006400U;  // 1024 + 128 + code
  return MultiplyAddF16(offset, 0x3c003c00U, 0xe480e480U);                      // - 1152
}

// E5M2 is the upper half of an f16.
KVANTA_DEVICE uint32_t E5m2Pair(uint32_t low_halves) {
  return (low_halves & 0x00ff00ffU) << 8U;
}

// A field and what it is too much by, in both halves: their difference as f16, exactly.
KVANTA_DEVICE uint32_t FieldPair(uint32_t fields, int offset) {
  const uint32_t less = (0xe400U + static_cast<uint32_t>(offset)) * 0x00010001U;  // - 1024 - offset
  return MultiplyAddF16(fields | 0x64006400U, 0x3c003c00U, less);
}

// E3M2 fields in both halves as f16: their values / kE3m2Unit, subnormal ones included.
KVANTA_DEVICE uint32_t E3m2Pair(uint32_t fields) {
  return ((fields & 0x00200020U) << 10U) | ((fields & 0x001f001fU) << 8U);
}

// Lloyd-Max levels of the fields in both halves, of 4 bits or of 3.
template <ElementType kElementType>
constexpr uint32_t LevelWord(int first) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= uint32_t{static_cast<uint8_t>(formats::Levels(kElementType).level[first + i])}
            << static_cast<unsigned>(8 * i);
  }
  return word;
}
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

// Two f32 as bf16: term `term` (0 to 2) of three, which are their value exactly, for bits are cut off, not rounded.
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

// Where 8 channels from `channel` on lie in a plane of `bits` bits: units of 4 bytes, and the shift to them.
struct PlanePlace {
  int unit;
  int shift;
};
KVANTA_DEVICE PlanePlace PlaceIn(int bits, int channel) {
  const int eighths = channel / 8 * bits;  // of 32 bits
  return {eighths / 4, 2 * (eighths % 4)};
}

// ---- keys: a block of 32 channels is 4 pairs of channels for each t, two for each product of 16

template <class Side>
struct KeyOperand {
  static constexpr int kLoads = Side::kSubbyte ? 1 : Side::kBits / 4;
  struct Words {
    Vec4 low[kLoads];  // units of tokens 4 g .. 4 g + 3
    Vec4 high;         // of the second plane
  };

  // Channel in half `half` of pair `pair` of a block. A pair is one of a unit's: of 2, 4 or 8 channels; of f32, of two
  // units.
  static KVANTA_DEVICE int Channel(int pair, int half, int t) {
    if constexpr (Side::kSubbyte) return 8 * t + pair + 4 * half;
    if constexpr (Side::kBits == 32) return 4 * (2 * pair + half) + t;
    if constexpr (Side::kBits == 16) return 2 * (4 * pair + t) + half;
    const int first = 4 * (4 * (pair / 2) + t);
    return first + (Side::kDecodeKind == DecodeKind::kE4M3 ? 2 * (pair % 2) + half : pair % 2 + 2 * half);
  }

  // `lane_line`: where the lane's tokens begin in the line of a unit (4 (g % 4) bytes, of group g / 4 of 16 tokens).
  template <class Cell>
  static KVANTA_DEVICE void Load(const Side& side, const Cell& cell, int head_dim, int block, int t, int lane_line,
                                 Words& words) {
    if constexpr (Side::kSubbyte) {
      const int channel = 32 * block + 8 * t;
      words.low[0] = words.high = {};
      if (channel >= head_dim) return;
      words.low[0] = cell.Codes4(lane_line + PlaceIn(side.LowBits(), channel).unit * 64);
      if (side.HighBits() != 0) {
        const int unit = head_dim * side.LowBits() / 32 + PlaceIn(side.HighBits(), channel).unit;
        words.high = cell.Codes4(lane_line + unit * 64);
      }
    } else {
      KVANTA_UNROLL
      for (int n = 0; n < kLoads; ++n) {
        const int unit = 4 * (kLoads * block + n) + t;
        words.low[n] = unit * (32 / Side::kBits) < head_dim ? cell.Codes4(lane_line + unit * 64) : Vec4{};
      }
    }
  }

  // Pair `kPair` of token 4 g + j; its term `term`, where codes have several.
  template <int kPair>
  static KVANTA_DEVICE uint32_t Pair(const Side& side, const Words& words, int j, int t, int term) {
    if constexpr (Side::kBits == 32) {
      return TermPair(words.low[2 * kPair].word[j], words.low[2 * kPair + 1].word[j], term);
    } else if constexpr (Side::kBits == 16) {
      return words.low[kPair].word[j];
    } else if constexpr (Side::kBits == 8) {
      const uint32_t unit = words.low[kPair / 2].word[j];
      if constexpr (Side::kDecodeKind == DecodeKind::kE4M3) return E4m3Pair(kPair % 2 == 0 ? unit : unit >> 16U);
      const uint32_t halves = kPair % 2 == 0 ? unit : unit >> 8U;
      return Side::kDecodeKind == DecodeKind::kInt8 ? Int8Pair(halves) : E5m2Pair(halves);
    } else if constexpr (formats::CodeBits(Side::kElementType) == 4) {
      return NibblePair<Side::kElementType, kPair>(words.low[0].word[j]);
    } else {
      const auto fields = [&](uint32_t word, int bits, int shift) {
        return (word >> static_cast<unsigned>(shift + bits * (kPair % 2) + 8 * (kPair / 2))) &
               (((1U << static_cast<unsigned>(bits)) - 1U) * 0x00010001U);
      };
      const int low = side.LowBits();
      uint32_t both = fields(words.low[0].word[j], low, PlaceIn(low, 8 * t).shift);
      if (const int high = side.HighBits(); high != 0) {
        both |= fields(words.high.word[j], high, PlaceIn(high, 8 * t).shift) << static_cast<unsigned>(low);
      }
      if constexpr (Side::kDecodeKind == DecodeKind::kLloyd) return LloydPair(both, low == 4);
      if constexpr (Side::kDecodeKind == DecodeKind::kE3M2) return E3m2Pair(both);
      return FieldPair(both, side.Offset());
    }
  }
};

// ---- values: pairs (token j, token 4 + j) of 8 tokens of 4 channels

template <class Side>
struct ValueOperand {
  static constexpr int kTokens = Side::kBits == 32 ? 1 : Side::kBits == 16 ? 2 : 4;  // of a 4-byte unit
  static constexpr int kLoads = 8 / kTokens;                                         // one for each unit of tokens
  static constexpr int kLoadWords = Side::kSubbyte ? 2 : 4;  // units of 4 channels; below 8 bits one has several
  struct Words {
    uint32_t low[kLoads][kLoadWords];
    uint32_t high[2][2];
  };

  template <class Cell>
  static KVANTA_DEVICE void Load(const Side& side, const Cell& cell, int head_dim, int block, int lane, Words& words) {
    const int channel = 32 * block + lane / 4 * 4;
    const int first = cell.Token(lane % 4 * 8) / kTokens;  // unit of tokens
    words = {};
    if (channel >= head_dim) return;
    if constexpr (Side::kSubbyte) {
      const int line = head_dim * (side.LowBits() + side.HighBits()) / 2;  // bytes of 4 tokens
      const auto load = [&](int section, int bits, uint32_t(&to)[2][2]) {
        const int byte = section + 4 * PlaceIn(bits, channel).unit + channel % 8 / 2;
        KVANTA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const Vec2 two = cell.Codes2((first + i) * line + 4 * byte);
          to[i][0] = two.word[0];
          to[i][1] = two.word[1];
        }
      };
      load(0, side.LowBits(), words.low);
      if (side.HighBits() != 0) load(head_dim * side.LowBits() / 8, side.HighBits(), words.high);
    } else {
      KVANTA_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const Vec4 four = cell.Codes4((first + i) * head_dim * 4 + 4 * channel);
        KVANTA_UNROLL
        for (int word = 0; word < 4; ++word) words.low[i][word] = four.word[word];
      }
    }
  }

  // The four pairs of channel 4 g + kChannel; their term `term`, where codes have several.
  template <int kChannel>
  static KVANTA_DEVICE void Pairs(const Side& side, const Words& words, int g, int term, uint32_t (&pairs)[4]) {
    const auto& w = words.low;
    if constexpr (Side::kBits == 32) {
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) pairs[j] = TermPair(w[j][kChannel], w[4 + j][kChannel], term);
    } else if constexpr (Side::kBits == 16) {
      pairs[0] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x5410);
      pairs[1] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x7632);
      pairs[2] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x5410);
      pairs[3] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x7632);
    } else if constexpr (Side::kDecodeKind == DecodeKind::kE4M3) {
      const uint32_t low = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x5140);
      const uint32_t high = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x7362);
      pairs[0] = E4m3Pair(low);
      pairs[1] = E4m3Pair(low >> 16U);
      pairs[2] = E4m3Pair(high);
      pairs[3] = E4m3Pair(high >> 16U);
    } else if constexpr (Side::kBits == 8) {
      const auto pair = [](uint32_t halves) {
        return Side::kDecodeKind == DecodeKind::kInt8 ? Int8Pair(halves) : E5m2Pair(halves);
      };
      FourPairs(w[0][kChannel], w[1][kChannel], pair, pairs);
    } else if constexpr (formats::CodeBits(Side::kElementType) == 4) {
      constexpr int kOdd = kChannel % 2;  // the upper nibble of a byte
      const uint32_t low = PermuteBytes(w[0][kChannel / 2], w[1][kChannel / 2], 0x5410);
      const uint32_t high = PermuteBytes(w[0][kChannel / 2], w[1][kChannel / 2], 0x7632);
      pairs[0] = NibblePair<Side::kElementType, kOdd>(low);
      pairs[1] = NibblePair<Side::kElementType, 2 + kOdd>(low);
      pairs[2] = NibblePair<Side::kElementType, kOdd>(high);
      pairs[3] = NibblePair<Side::kElementType, 2 + kOdd>(high);
    } else {
      const auto fields = [&](uint32_t word, int bits) {
        const int shift = PlaceIn(bits, 4 * g).shift + bits * (kChannel % 2);
        return (word >> static_cast<unsigned>(shift)) & (((1U << static_cast<unsigned>(bits)) - 1U) * 0x01010101U);
      };
      uint32_t both[2];
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        both[i] = fields(w[i][kChannel / 2], side.LowBits());
        if (side.HighBits() != 0) {
          both[i] |= fields(words.high[i][kChannel / 2], side.HighBits()) << static_cast<unsigned>(side.LowBits());
        }
      }
      const auto pair = [&](uint32_t halves) {
        if constexpr (Side::kDecodeKind == DecodeKind::kE3M2) return E3m2Pair(halves);
        return FieldPair(halves & 0x00ff00ffU, side.Offset());
      };
      FourPairs(both[0], both[1], pair, pairs);
    }
  }

 private:
  // Of bytes of tokens 0 to 3 and 4 to 7; pair takes them in the low halves of 16 bits, beside what it has to mask.
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
