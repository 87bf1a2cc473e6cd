// Decoding of trellis codes code by code, for units without a byte look-up of 256 entries. Included by isa_<isa>.cc
// after its codes.
#pragma once

#include <cstdint>

#include "formats/trellis_levels.h"
#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// int8 codes by 8-bit operands, in the arithmetic of operands of 16 bits.
struct CodeInt8x8 : CodeInt8 {
  static constexpr float kMaxOperand = kMaxByteQuery;
};
struct CodeInt8x8Values : CodeInt8Values {
  static constexpr float kMaxOperand = kMaxByteProb;
};

inline constexpr int kMaxFusedRows = 0;  // codes are not decoded in registers

template <int kBits>
struct TrellisLevel {
  static constexpr formats::TrellisLevelTable kTable = formats::kTrellisLevels[kBits - formats::kMinTrellisBits];

  // Level of code i of a string.
  static KVANTA_INLINE uint8_t At(uint64_t string, int i) {
    return static_cast<uint8_t>(kTable.levels[string >> (kBits * i) & 0xff]);
  }
};

template <int kBits>
struct TrellisKeys {
  int head_dim;

  // Decodes a group of 16 tokens to the order of int8 keys: [head_dim / 4][16 tokens][4].
  void Unpack(const uint8_t* group, uint8_t* out) const {
    const int units = head_dim * kBits / 32;  // words of a row, 64 bytes apart
    for (int octet = 0; octet < head_dim / 8; ++octet) {
      const int unit = octet * kBits / 4, next = unit + 1 < units ? unit + 1 : 0, first = octet * kBits % 4 * 8;
      for (int token = 0; token < 16; ++token) {
        uint32_t low, high;
        __builtin_memcpy(&low, group + unit * 64 + token * 4, 4);
        __builtin_memcpy(&high, group + next * 64 + token * 4, 4);
        const uint64_t string = (uint64_t{high} << 32 | low) >> first;
        uint8_t* to = out + octet * 128 + token * 4;
        for (int i = 0; i < 4; ++i) to[i] = TrellisLevel<kBits>::At(string, i);
        for (int i = 4; i < 8; ++i) to[60 + i] = TrellisLevel<kBits>::At(string, i);
      }
    }
  }
};

template <int kBits>
struct TrellisValues {
  // Decodes tokens [4 quad, 4 end_quad) of a cell, to their places in the order of int8 values: [quad][head_dim][4].
  static void Unpack(const uint8_t* codes, int head_dim, int quad, int end_quad, uint8_t* out) {
    const int row_bytes = head_dim * kBits / 8;
    for (; quad < end_quad; ++quad) {
      const uint8_t* bytes = codes + int64_t{quad} * 4 * row_bytes;
      uint8_t* to = out + int64_t{quad} * 4 * head_dim;
      for (int octet = 0; octet < head_dim / 8; ++octet, to += 32) {
        for (int token = 0; token < 4; ++token) {
          uint64_t string = 0;
          for (int i = 0; i <= kBits; ++i) {
            const int byte = octet * kBits + i < row_bytes ? octet * kBits + i : 0;
            string |= uint64_t{bytes[4 * byte + token]} << (8 * i);
          }
          for (int i = 0; i < 8; ++i) to[4 * i + token] = TrellisLevel<kBits>::At(string, i);
        }
      }
    }
  }
};

}  // namespace
}  // namespace kvanta::kernels
