// Latents as values: their cell lies in the order of keys (docs/adr/0011), which a lane reads as it is. A unit that
// includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

// A chunk of a latent's cell from channel `first` on, a multiple of the channels that share a scale.
struct LatentCell : PageCell {
  int row_bytes;
  int first;

  KVANTA_DEVICE LatentCell(const PageCell& page, int bytes, int channel)
      : PageCell(page), row_bytes(bytes), first(channel) {}

  KVANTA_DEVICE Vec4 BlockScales(int block, int token) const {
    return PageCell::BlockScales(first / 32 + block, token);
  }
  KVANTA_DEVICE Vec4 BlockFloats(int block, int token) const {
    return PageCell::BlockFloats(first / (32 * kBlocksOfF32) + block, token);
  }
  KVANTA_DEVICE Vec2 BlockBytes8(int half, int token) const { return PageCell::BlockBytes8(first / 16 + half, token); }
};

// As ValueOperand: pairs (token j, token 4 + j) of 8 tokens of 4 channels. A 4-byte unit has channels of one token.
template <class Side>
struct LatentOperand {
  static constexpr int kBits = Side::kSubbyte ? Side::LowBits() : Side::kBits;
  static constexpr int kUnits = kBits < 8 ? 1 : kBits / 8;  // of 4 channels; of 4 bits half of one
  static_assert(!Side::kSubbyte || (kBits == 4 && Side::HighBits() == 0));
  struct Words {
    Vec4 first[kUnits], second[kUnits];  // of tokens 8 t .. 8 t + 3, and of the next 4
  };

  static KVANTA_DEVICE void Load(const Side& /*side*/, const LatentCell& cell, int head_dim, int block, int lane,
                                 Words& words) {
    const int channel = 32 * block + lane / 4 * 4;
    words = {};
    if (channel >= head_dim) return;
    const auto line = [&](int token) {
      const int slot = cell.Token(token);
      return slot / 16 * (16 * cell.row_bytes) + slot % 16 * 4 + (cell.first + channel) * kBits / 32 * 64;
    };
    const int first = line(lane % 4 * 8), second = line(lane % 4 * 8 + 4);
    KVANTA_UNROLL
    for (int unit = 0; unit < kUnits; ++unit) {
      words.first[unit] = cell.Codes4(first + unit * 64);
      words.second[unit] = cell.Codes4(second + unit * 64);
    }
  }

  template <int kChannel>
  static KVANTA_DEVICE void Pairs(const Side& /*side*/, const Words& words, int g, int term, uint32_t (&pairs)[4]) {
    constexpr int kUnit = kChannel * kBits / 32;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t a = words.first[kUnit].word[j];
      const uint32_t b = words.second[kUnit].word[j];
      if constexpr (kBits == 32) {
        pairs[j] = TermPair(a, b, term);
      } else if constexpr (kBits == 16) {
        pairs[j] = PermuteBytes(a, b, kChannel % 2 == 0 ? 0x5410 : 0x7632);
      } else if constexpr (kBits == 8) {
        static_assert(Side::kDecodeKind == DecodeKind::kE4M3);
        pairs[j] = E4m3Pair(PermuteBytes(a, b, kChannel + 0x10U * (4 + kChannel)));
      } else {
        pairs[j] = NibblePair<Side::kElementType, kChannel>(PermuteBytes(a, b, g % 2 == 0 ? 0x5410 : 0x7632));
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
