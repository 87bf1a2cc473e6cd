// Chunks of cells copied to shared memory asynchronously (cp.async) while the warp computes: bytes in flight take no
// registers. Include the primitives first.
//
// A chunk's codes are contiguous in a cell. Their copy is swizzled to avoid bank conflicts: for keys, bit 5 of a byte's
// offset is flipped where bit 7 is set (units of t = 2, 3 against t = 0, 1); for values, each 8 tokens are padded so
// that the next ones are shifted by 32 bytes.
#pragma once

#include "kernels/attention/cuda/outputs.h"
#include "kernels/attention/cuda/page_cell.h"

namespace kvanta::kernels::cuda {

template <class KvType, bool kIsKey, int kHeadDim>
struct StagedCell {
  static constexpr bool kIsStaged = true;
  static constexpr int kBits = KvType::LowBits() + KvType::HighBits();
  static constexpr int kRowBytes = kHeadDim * kBits / 8;
  static constexpr int kOctet = 8 * kRowBytes;
  static constexpr int kOctetStride = kOctet + (160 - kOctet % 128) % 128;
  // Scale sections of the chunk's tokens.
  static constexpr BlockScale kBlock = KvType::BlockScaling();
  static constexpr int kScaleBytes = kBlock == BlockScale::kE4m3Halves ? 1 : 2;
  static constexpr int kScales = kBlock == BlockScale::kE4m3Halves                     ? kHeadDim / 16
                                 : kBlock == BlockScale::kFp16                         ? kHeadDim / 32
                                 : KvType::TokenScaling() == formats::ScaleType::kFp16 ? 1
                                                                                       : 0;
  static constexpr int kSectionBytes = kChunkTokens * kScaleBytes;
  static constexpr int kScalesAt = kIsKey ? (4 * kOctet + 127) / 128 * 128 : 4 * kOctetStride;
  static constexpr int kBytes = kScalesAt + kScales * kSectionBytes;
  static_assert(kRowBytes % 16 == 0 && kBytes % 16 == 0);
  static_assert(kBlock == BlockScale::kNone || kBlock == BlockScale::kFp16 || kBlock == BlockScale::kE4m3Halves);
  static_assert(!KvType::HasBlockOffset() && !KvType::HasTokenOffset() && !KvType::HasChannelScales());
  static_assert(KvType::TokenScaling() == formats::ScaleType::kNone ||
                KvType::TokenScaling() == formats::ScaleType::kFp16);

  int base;  // in shared memory

  static constexpr KVANTA_DEVICE int Swizzle(int offset) {
    if constexpr (kIsKey) return offset ^ ((offset >> 2) & 32);
    return offset / kOctet * kOctetStride + offset % kOctet;
  }

  // Starts the copies, by all lanes of the warp. `cell`: in the page; `first_token`: of the chunk, in the page.
  KVANTA_DEVICE void Fetch(const uint8_t* cell, const CellOffsets& offsets, int page_size, int first_token,
                           int lane) const {
    const uint8_t* codes = cell + offsets.codes + first_token * kRowBytes;
    KVANTA_UNROLL
    for (int i = 0; i < kRowBytes / 16; ++i) {
      const int offset = (i * kWarp + lane) * 16;
      CopyToShared16(base + Swizzle(offset), codes + offset);
    }
    constexpr int kPieces = kSectionBytes / 16;
    const uint8_t* scales =
        cell + (kBlock == BlockScale::kNone ? offsets.token_scales : offsets.block_scales) + first_token * kScaleBytes;
    KVANTA_UNROLL
    for (int first = 0; first < kScales * kPieces; first += kWarp) {
      const int piece = first + lane;
      if (piece < kScales * kPieces) {
        CopyToShared16(base + kScalesAt + piece * 16,
                       scales + piece / kPieces * (page_size * kScaleBytes) + piece % kPieces * 16);
      }
    }
  }

  static KVANTA_DEVICE int WrapToken(int token) { return token; }
  KVANTA_DEVICE Vec4 Codes4(int offset) const { return LoadShared<Vec4>(base + Swizzle(offset)); }
  KVANTA_DEVICE Vec2 Codes2(int offset) const { return LoadShared<Vec2>(base + Swizzle(offset)); }
  KVANTA_DEVICE Vec4 BlockScales(int block, int token) const { return LoadShared<Vec4>(ScaleAt(block, token)); }
  KVANTA_DEVICE Vec4 TokenScales(int token) const { return LoadShared<Vec4>(ScaleAt(0, token)); }
  KVANTA_DEVICE Vec2 BlockBytes8(int half, int token) const { return LoadShared<Vec2>(ScaleAt(half, token)); }
  KVANTA_DEVICE uint32_t BlockBytes4(int half, int token) const { return LoadShared<uint32_t>(ScaleAt(half, token)); }
  // Not present in staged types.
  static KVANTA_DEVICE Vec4 BlockOffsets(int /*block*/, int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 TokenOffsets(int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 TokenFloats(int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 BlockFloats(int /*block*/, int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 ChannelScales(int /*head_dim*/, int /*channel*/) { return {}; }
  static KVANTA_DEVICE Vec4 ChannelOffsets(int /*head_dim*/, int /*channel*/) { return {}; }

 private:
  KVANTA_DEVICE int ScaleAt(int section, int token) const {
    return base + kScalesAt + section * kSectionBytes + token * kScaleBytes;
  }
};

}  // namespace kvanta::kernels::cuda
