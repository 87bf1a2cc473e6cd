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
  static constexpr bool kIsDecoded = false;
  static constexpr int kBits = KvType::LowBits() + KvType::HighBits();
  static constexpr int kRowBytes = kHeadDim * kBits / 8;
  static constexpr int kOctet = 8 * kRowBytes;
  static constexpr int kOctetStride = kOctet + (160 - kOctet % 128) % 128;
  // Scale sections of the chunk's tokens.
  static constexpr BlockScale kBlock = KvType::BlockScaling();
  static constexpr int kScaleBytes = kBlock == BlockScale::kE4m3Halves || kBlock == BlockScale::kPower ? 1 : 2;
  static constexpr int kScales = kBlock == BlockScale::kE4m3Halves                             ? kHeadDim / 16
                                 : kBlock == BlockScale::kFp16 || kBlock == BlockScale::kPower ? kHeadDim / 32
                                 : KvType::TokenScaling() == formats::ScaleType::kFp16         ? 1
                                                                                               : 0;
  static constexpr int kSectionBytes = kChunkTokens * kScaleBytes;
  // Sections of zero points of the chunk's tokens, fp16.
  static constexpr int kOffsets = KvType::HasBlockOffset() ? kHeadDim / 32 : KvType::HasTokenOffset() ? 1 : 0;
  static constexpr int kOffsetSectionBytes = kChunkTokens * 2;
  // Scales of the chunk's channels, and as many zero points, fp16.
  static constexpr int kChannelBytes = KvType::HasChannelScales() ? 2 * kHeadDim : 0;
  static constexpr int kScalesAt = kIsKey ? (4 * kOctet + 127) / 128 * 128 : 4 * kOctetStride;
  static constexpr int kOffsetsAt = kScalesAt + kScales * kSectionBytes;
  static constexpr int kChannelsAt = kOffsetsAt + kOffsets * kOffsetSectionBytes;
  static constexpr int kBytes = kChannelsAt + 2 * kChannelBytes;
  static_assert(kRowBytes % 16 == 0 && kBytes % 16 == 0);
  static_assert(kBlock == BlockScale::kNone || kBlock == BlockScale::kFp16 || kBlock == BlockScale::kPower ||
                kBlock == BlockScale::kE4m3Halves);
  static_assert(KvType::TokenScaling() == formats::ScaleType::kNone ||
                KvType::TokenScaling() == formats::ScaleType::kFp16);

  int base;  // in shared memory

  static constexpr KVANTA_DEVICE int Swizzle(int offset) {
    if constexpr (kIsKey) return offset ^ ((offset >> 2) & 32);
    return offset / kOctet * kOctetStride + offset % kOctet;
  }
  // Swizzle of a sum: `of_warp` leaves the lane's swizzle alone (a multiple of 256 bytes for keys; in the lane's 8
  // tokens for values).
  static constexpr KVANTA_DEVICE int SwizzleSum(int of_lane, int of_warp) { return Swizzle(of_lane) + of_warp; }

  // Starts the copies, by all lanes of the warp. `lane_record`: the record's start plus the KV head's offset and 16
  // bytes per lane; `cell`: KV head 0's; `first_token`: of the chunk, in the page.
  KVANTA_DEVICE void Fetch(const uint8_t* lane_record, const CellOffsets& cell, int page_size, int first_token,
                           int lane) const {
    const uint8_t* codes = lane_record + (cell.first_cell + cell.codes + first_token * kRowBytes);
    KVANTA_UNROLL
    for (int i = 0; i < kRowBytes / 16; ++i) {
      constexpr int kStep = kWarp * 16;
      const bool splits = kIsKey || kOctet % kStep == 0;
      const int to = splits ? Swizzle(lane * 16) + Swizzle(i * kStep) : Swizzle(lane * 16 + i * kStep);
      CopyToShared16(base + to, codes + i * kStep);
    }
    // Sections of one value per token of the page.
    const auto fetch_sections = [&](auto value_bytes, auto sections, int to, int64_t section) {
      constexpr int kValueBytes = decltype(value_bytes)::value;
      constexpr int kPieces = kChunkTokens * kValueBytes / 16;  // pieces of a section
      const int of_lane = lane / kPieces * (kValueBytes * (page_size - kChunkTokens));
      FetchPieces<decltype(sections)::value * kPieces>(
          to, lane_record + (cell.first_cell + section + (of_lane + first_token * kValueBytes)), lane);
    };
    fetch_sections(std::integral_constant<int, kScaleBytes>{}, std::integral_constant<int, kScales>{}, kScalesAt,
                   kBlock == BlockScale::kNone ? cell.token_scales : cell.block_scales);
    fetch_sections(std::integral_constant<int, 2>{}, std::integral_constant<int, kOffsets>{}, kOffsetsAt,
                   KvType::HasBlockOffset() ? cell.block_offsets : cell.token_offsets);
    const int64_t group = cell.first_cell + first_token / kChunkTokens * kChannelBytes;
    FetchPieces<kChannelBytes / 16>(kChannelsAt, lane_record + (group + cell.channel_scales), lane);
    FetchPieces<kChannelBytes / 16>(kChannelsAt + kChannelBytes, lane_record + (group + cell.channel_offsets), lane);
  }

  static KVANTA_DEVICE int WrapToken(int token) { return token; }
  KVANTA_DEVICE Vec4 Codes4(int of_lane, int of_warp) const {
    return LoadShared<Vec4>(base + SwizzleSum(of_lane, of_warp));
  }
  KVANTA_DEVICE Vec2 Codes2(int of_lane, int of_warp) const {
    return LoadShared<Vec2>(base + SwizzleSum(of_lane, of_warp));
  }
  KVANTA_DEVICE uint32_t Codes1(int of_lane, int of_warp) const {
    return LoadShared<uint32_t>(base + SwizzleSum(of_lane, of_warp));
  }
  KVANTA_DEVICE Vec2 BlockScales(int block, int token) const { return LoadShared<Vec2>(ScaleAt(block, token)); }
  KVANTA_DEVICE Vec2 TokenScales(int token) const { return LoadShared<Vec2>(ScaleAt(0, token)); }
  KVANTA_DEVICE Vec2 BlockBytes8(int half, int token) const { return LoadShared<Vec2>(ScaleAt(half, token)); }
  KVANTA_DEVICE uint32_t BlockBytes4(int half, int token) const { return LoadShared<uint32_t>(ScaleAt(half, token)); }
  KVANTA_DEVICE Vec2 BlockOffsets(int block, int token) const { return LoadShared<Vec2>(OffsetAt(block, token)); }
  KVANTA_DEVICE Vec2 TokenOffsets(int token) const { return LoadShared<Vec2>(OffsetAt(0, token)); }
  KVANTA_DEVICE Vec4 ChannelScales(int /*head_dim*/, int channel) const {
    return LoadShared<Vec4>(base + kChannelsAt + 2 * channel);
  }
  KVANTA_DEVICE Vec4 ChannelOffsets(int /*head_dim*/, int channel) const {
    return LoadShared<Vec4>(base + kChannelsAt + kChannelBytes + 2 * channel);
  }
  // Not present in staged types.
  static KVANTA_DEVICE Vec4 TokenFloats(int /*token*/) { return {}; }
  static KVANTA_DEVICE Vec4 BlockFloats(int /*block*/, int /*token*/) { return {}; }

 private:
  // A piece of 16 bytes for each of the first kLanes lanes.
  template <int kLanes>
  KVANTA_DEVICE void FetchPieces(int to, const uint8_t* from, int lane) const {
    static_assert(kLanes <= kWarp);
    if constexpr (kLanes != 0) {
      if (lane < kLanes) CopyToShared16(base + to + lane * 16, from);
    }
  }
  KVANTA_DEVICE int OffsetAt(int section, int token) const {
    return base + kOffsetsAt + section * kOffsetSectionBytes + token * 2;
  }
  KVANTA_DEVICE int ScaleAt(int section, int token) const {
    return base + kScalesAt + section * kSectionBytes + token * kScaleBytes;
  }
};

}  // namespace kvanta::kernels::cuda
