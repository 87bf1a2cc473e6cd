// Chunks of cells on their way to a warp: copied to shared memory while the warp computes, so that bytes in flight cost
// no registers. A unit that includes this has included the primitives.
//
// A chunk's codes are one piece of a cell, and are copied as they lie, but for what keeps lanes that load at once in
// banks of their own: of keys, bit 5 of a byte's place is flipped where bit 7 is set (units of t = 2, 3 beside those of
// 0, 1); of values, 8 tokens' bytes are followed by as many as put the next 32 bytes further.
#pragma once

#include "kernels/attention/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

template <class Side, bool kIsKey, int kHeadDim>
struct StagedCell {
  static constexpr bool kIsStaged = true;
  static constexpr int kBits = Side::LowBits() + Side::HighBits();
  static constexpr int kRowBytes = kHeadDim * kBits / 8;
  static constexpr int kOctet = 8 * kRowBytes;
  static constexpr int kOctetStride = kOctet + (160 - kOctet % 128) % 128;
  // Scales: planes of the chunk's tokens.
  static constexpr BlockScale kBlock = Side::Block();
  static constexpr int kScaleBytes = kBlock == BlockScale::kE4m3Halves ? 1 : 2;
  static constexpr int kScales = kBlock == BlockScale::kE4m3Halves            ? kHeadDim / 16
                                 : kBlock == BlockScale::kFp16                ? kHeadDim / 32
                                 : Side::Token() == formats::ScaleType::kFp16 ? 1
                                                                              : 0;
  static constexpr int kPlaneBytes = kChunkTokens * kScaleBytes;
  static constexpr int kScalesAt = kIsKey ? (4 * kOctet + 127) / 128 * 128 : 4 * kOctetStride;
  static constexpr int kBytes = kScalesAt + kScales * kPlaneBytes;
  static_assert(kRowBytes % 16 == 0 && kBytes % 16 == 0);
  static_assert(kBlock == BlockScale::kNone || kBlock == BlockScale::kFp16 || kBlock == BlockScale::kE4m3Halves);
  static_assert(!Side::BlockOffset() && !Side::TokenOffset() && !Side::Channel());
  static_assert(Side::Token() == formats::ScaleType::kNone || Side::Token() == formats::ScaleType::kFp16);

  int base;  // in shared memory

  static constexpr KVANTA_DEVICE int Place(int offset) {
    if constexpr (kIsKey) return offset ^ ((offset >> 2) & 32);
    return offset / kOctet * kOctetStride + offset % kOctet;
  }

  // Begins the copies, by all lanes of the warp. `cell`: in the page; `slot`: of the chunk's first token.
  KVANTA_DEVICE void Fetch(const uint8_t* cell, const CellPlace& place, int page_size, int slot, int lane) const {
    const uint8_t* codes = cell + place.codes + slot * kRowBytes;
    KVANTA_UNROLL
    for (int i = 0; i < kRowBytes / 16; ++i) {
      const int offset = (i * kWarp + lane) * 16;
      CopyToShared16(base + Place(offset), codes + offset);
    }
    constexpr int kPieces = kPlaneBytes / 16;
    const uint8_t* scales =
        cell + (kBlock == BlockScale::kNone ? place.token_scales : place.block_scales) + slot * kScaleBytes;
    KVANTA_UNROLL
    for (int first = 0; first < kScales * kPieces; first += kWarp) {
      const int piece = first + lane;
      if (piece < kScales * kPieces) {
        CopyToShared16(base + kScalesAt + piece * 16,
                       scales + piece / kPieces * (page_size * kScaleBytes) + piece % kPieces * 16);
      }
    }
  }

  static KVANTA_DEVICE int Token(int token) { return token; }
  KVANTA_DEVICE Vec4 Codes4(int offset) const { return LoadShared<Vec4>(base + Place(offset)); }
  KVANTA_DEVICE Vec2 Codes2(int offset) const { return LoadShared<Vec2>(base + Place(offset)); }
  KVANTA_DEVICE Vec4 BlockScales(int block, int token) const { return LoadShared<Vec4>(ScaleAt(block, token)); }
  KVANTA_DEVICE Vec4 TokenScales(int token) const { return LoadShared<Vec4>(ScaleAt(0, token)); }
  KVANTA_DEVICE Vec2 BlockBytes8(int half, int token) const { return LoadShared<Vec2>(ScaleAt(half, token)); }
  KVANTA_DEVICE uint32_t BlockBytes4(int half, int token) const { return LoadShared<uint32_t>(ScaleAt(half, token)); }
  // Of what these sides do not have.
  static KVANTA_DEVICE Vec4 BlockOffsets(int /*block*/, int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 TokenOffsets(int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 TokenFloats(int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 BlockFloats(int /*block*/, int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 ChannelScales(int /*head_dim*/, int /*channel*/) { return {}; }
  static KVANTA_DEVICE Vec4 ChannelOffsets(int /*head_dim*/, int /*channel*/) { return {}; }

 private:
  KVANTA_DEVICE int ScaleAt(int section, int token) const {
    return base + kScalesAt + section * kPlaneBytes + token * kScaleBytes;
  }
};

}  // namespace kvanta::kernels::cuda
