// Codes to operands of the tensor cores, in registers. A unit that includes this has included the primitives.
//
// A chunk is 32 tokens of a page. Its cell lies as on the CPU (formats/cell_layout.h), and the order of tokens and
// channels within a product is free, so a lane loads what it needs in whole vectors, and nothing is shuffled:
//
//   keys     lane (g, t) = (lane / 4, lane % 4), load n: 4-byte unit 4 n + t of tokens 4 g .. 4 g + 3. Column g of tile
//   j
//            is token 4 g + j; the channels of a product's step are those of a unit of each t (KeyChannel).
//   values   lane (g, t), block b: tokens 8 t .. 8 t + 7 of channels 32 b + 4 g .. 32 b + 4 g + 3. Column g of tile i
//   is
//            channel 32 b + 4 g + i; pair j of a product's steps is tokens (8 t + j, 8 t + 4 + j), as Q K leaves them.
#pragma once

#include <cstdint>

#include "formats/code.h"

namespace kvanta::kernels::cuda {

using formats::Code;

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
inline constexpr float kE2m1Unit = 0x1p14F;  // f16's and E2M1's exponents are biased by 15 and 1
template <Code kCode, int kNibble>
KVANTA_DEVICE uint32_t NibblePair(uint32_t word) {
  if constexpr (kCode == Code::kE2M1) {
    constexpr unsigned kShift = 4U * kNibble;
    const uint32_t sign = (kShift == 12 ? word : word << (12U - kShift)) & 0x80008000U;
    const uint32_t magnitude = (kShift == 12 ? word >> 3U : word << (9U - kShift)) & 0x0e000e00U;
    return sign | magnitude;
  } else {
    // 1024 + field, or 1024 + 16 field, less what is too much: exact. Levels are field - 8, or the field itself.
    constexpr bool kSigned = kCode == Code::kInt4;
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

// What the tensor cores get of a code.
template <Code kCode>
struct CodeOperand {
  static constexpr int kBits = formats::CodeBits(kCode);
  static constexpr bool kBf16 = kCode == Code::kBf16;
  // Codes are kept to the last bit; queries and weights are floats of 8 bits in two terms, or of 11 in one.
  static constexpr int kTerms = kBf16 ? 2 : 1;
  // An operand times this is the value.
  static constexpr float kUnit = kCode == Code::kE2M1 ? kE2m1Unit : 1.0F;

  // ---- keys: a 4-byte unit of one token is kRegisters pairs

  static constexpr int kPanelChannels = 32 / kBits;
  static constexpr int kRegisters = kPanelChannels / 2;
  // Channel of the unit that is in half `half` of pair `i`.
  static constexpr KVANTA_DEVICE int KeyChannel(int i, int half) {
    if (kBits == 16) return half;
    if (kCode == Code::kE4M3) return 2 * i + half;
    return i + half * kRegisters;
  }
  template <int kPair>
  static KVANTA_DEVICE uint32_t KeyPair(uint32_t unit) {
    if constexpr (kBits == 16) return unit;
    if constexpr (kCode == Code::kE4M3) return E4m3Pair(kPair == 0 ? unit : unit >> 16U);
    if constexpr (kCode == Code::kE5M2) return E5m2Pair(kPair == 0 ? unit : unit >> 8U);
    if constexpr (kCode == Code::kInt8) return Int8Pair(kPair == 0 ? unit : unit >> 8U);
    if constexpr (kBits == 4) return NibblePair<kCode, kPair>(unit);
  }

  // ---- values: pairs (token j, token 4 + j) of 8 tokens of 4 channels

  // Words of the 8 tokens: a 4-byte unit has 4 / e tokens of an element of e bytes.
  static constexpr int kTokens = kBits == 16 ? 2 : 4;    // of a unit
  static constexpr int kLoads = 8 / kTokens;             // one for each unit of tokens
  static constexpr int kLoadWords = kBits == 4 ? 2 : 4;  // units of 4 channels
  static constexpr int kLoadBytes = 4 * kLoadWords;
  struct Loaded {
    uint32_t word[kLoads][kLoadWords];
  };
  // The four pairs of channel i.
  template <int kChannel>
  static KVANTA_DEVICE void ValuePairs(const Loaded& loaded, uint32_t (&pairs)[4]) {
    const auto& w = loaded.word;
    if constexpr (kBits == 16) {
      pairs[0] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x5410);
      pairs[1] = PermuteBytes(w[0][kChannel], w[2][kChannel], 0x7632);
      pairs[2] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x5410);
      pairs[3] = PermuteBytes(w[1][kChannel], w[3][kChannel], 0x7632);
    } else if constexpr (kCode == Code::kE4M3) {
      const uint32_t low = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x5140);
      const uint32_t high = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x7362);
      pairs[0] = E4m3Pair(low);
      pairs[1] = E4m3Pair(low >> 16U);
      pairs[2] = E4m3Pair(high);
      pairs[3] = E4m3Pair(high >> 16U);
    } else if constexpr (kBits == 8) {
      const uint32_t low = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x5410);
      const uint32_t high = PermuteBytes(w[0][kChannel], w[1][kChannel], 0x7632);
      const auto pair = [](uint32_t halves) { return kCode == Code::kInt8 ? Int8Pair(halves) : E5m2Pair(halves); };
      pairs[0] = pair(low);
      pairs[1] = pair(low >> 8U);
      pairs[2] = pair(high);
      pairs[3] = pair(high >> 8U);
    } else {
      constexpr int kWord = kChannel / 2;
      constexpr int kOdd = kChannel % 2;  // the upper nibble of a byte
      const uint32_t low = PermuteBytes(w[0][kWord], w[1][kWord], 0x5410);
      const uint32_t high = PermuteBytes(w[0][kWord], w[1][kWord], 0x7632);
      pairs[0] = NibblePair<kCode, kOdd>(low);
      pairs[1] = NibblePair<kCode, 2 + kOdd>(low);
      pairs[2] = NibblePair<kCode, kOdd>(high);
      pairs[3] = NibblePair<kCode, 2 + kOdd>(high);
    }
  }
};

}  // namespace kvanta::kernels::cuda
