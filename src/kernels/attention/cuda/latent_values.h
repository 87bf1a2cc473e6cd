// Latents as values, decoded from cells in key order (docs/adr/0011). Include the primitives first.
#pragma once

#include "kernels/attention/cuda/page_cell.h"

namespace kvanta::kernels::cuda {

// A chunk of a latent's cell from channel `first` on; `first` is a multiple of the channels per scale.
struct LatentCell : PageCell {
  int row_bytes;
  int first;

  KVANTA_DEVICE LatentCell(const PageCell& page, int bytes, int channel)
      : PageCell(page), row_bytes(bytes), first(channel) {}

  KVANTA_DEVICE Vec2 BlockScales(int block, int token) const {
    return PageCell::BlockScales(first / 32 + block, token);
  }
  KVANTA_DEVICE Vec4 BlockFloats(int block, int token) const {
    return PageCell::BlockFloats(first / (32 * kBlocksPerF32Scale) + block, token);
  }
  KVANTA_DEVICE uint32_t BlockBytes4(int half, int token) const {
    return PageCell::BlockBytes4(first / 16 + half, token);
  }
  KVANTA_DEVICE Vec2 BlockBytes8(int half, int token) const { return PageCell::BlockBytes8(first / 16 + half, token); }
};

// Like ValueOperand: pairs (token j, token 4 + j) of 8 tokens and 4 channels. A 4-byte unit holds channels of one
// token.
template <class KvType>
struct LatentOperand {
  static constexpr int kBits = KvType::kSubbyte ? KvType::LowBits() : KvType::kBits;
  static constexpr int kUnits = kBits < 8 ? 1 : kBits / 8;  // per 4 channels; half of one at 4 bits
  static_assert(!KvType::kSubbyte || (kBits == 4 && KvType::HighBits() == 0));
  struct Raw {
    Vec4 first[kUnits], second[kUnits];  // tokens 8 t .. 8 t + 3, 8 t + 4 .. 8 t + 7
  };

  static KVANTA_DEVICE void Load(const KvType& /*side*/, const LatentCell& cell, int head_dim, int block, int lane,
                                 Raw& raw) {
    const int of_block = lane / 4 * 4;  // channel
    raw = {};
    if (32 * block + of_block >= head_dim) return;
    const auto line = [&](int token) {  // of block 0
      const int index = cell.WrapToken(token);
      return index / 16 * (16 * cell.row_bytes) + index % 16 * 4 + cell.first * kBits * 2 + of_block * kBits / 32 * 64;
    };
    const int first = line(lane % 4 * 8), second = line(lane % 4 * 8 + 4);
    KVANTA_UNROLL
    for (int unit = 0; unit < kUnits; ++unit) {
      raw.first[unit] = cell.Codes4(first, block * kBits * 64 + unit * 64);
      raw.second[unit] = cell.Codes4(second, block * kBits * 64 + unit * 64);
    }
  }

  template <int kChannel>
  static KVANTA_DEVICE void Pairs(const KvType& /*side*/, const Raw& raw, int g, int term, uint32_t (&pairs)[4]) {
    constexpr int kUnit = kChannel * kBits / 32;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t a = raw.first[kUnit].word[j];
      const uint32_t b = raw.second[kUnit].word[j];
      if constexpr (kBits == 32) {
        pairs[j] = TermPair(a, b, term);
      } else if constexpr (kBits == 16) {
        pairs[j] = PermuteBytes(a, b, kChannel % 2 == 0 ? 0x5410 : 0x7632);
      } else if constexpr (kBits == 8) {
        if constexpr (KvType::kDecodeKind == DecodeKind::kE4M3) {
          pairs[j] = E4m3Pair(PermuteBytes(a, b, kChannel + 0x10U * (4 + kChannel)));
        } else {
          const uint32_t halves = PermuteBytes(a, b, kChannel + 0x100U * (4 + kChannel));
          pairs[j] = KvType::kDecodeKind == DecodeKind::kInt8 ? Int8Pair(halves) : E5m2Pair(halves);
        }
      } else {
        pairs[j] = NibblePair<KvType::kElementType, kChannel>(PermuteBytes(a, b, g % 2 == 0 ? 0x5410 : 0x7632));
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
