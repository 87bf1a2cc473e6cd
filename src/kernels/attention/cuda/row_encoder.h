// A warp's encoding of a row of K or V: by the format's host/device encoder, or a search, to shared memory, and from
// there to the cache layout. Include the primitives first.
#pragma once

#include "formats/format_traits.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/group_allocation.h"
#include "kernels/attention/cuda/trellis_encoder.h"

namespace kvanta::kernels::cuda {

inline constexpr int kMaxRowDim = kMaxLatentRank;

// A warp's shared memory: the row, then its encoded sections.
inline constexpr int kAppendRowBytes = 4 * kMaxRowDim;
inline constexpr int kCodesAt = kAppendRowBytes;
inline constexpr int kBlockScalesAt = kCodesAt + 4 * kMaxRowDim;
inline constexpr int kBlockOffsetsAt = kBlockScalesAt + kMaxRowDim;
inline constexpr int kTokenScalesAt = kBlockOffsetsAt + kMaxRowDim;
inline constexpr int kTokenOffsetsAt = kTokenScalesAt + 16;
inline constexpr int kAppendBytes = kTokenOffsetsAt + 16;

inline constexpr int kOffsetBytes = 2;  // fp16

template <class Format>
struct RowEncoder {
  static constexpr formats::Scaling kScaling = Format::kScaling;
  static constexpr formats::ElementTypeInfo kElementType = formats::Info(Format::kElementType);
  static constexpr int kBits = kElementType.low_bits + kElementType.high_bits;
  static constexpr int kBlockBytes = formats::Bytes(kScaling.block);
  static constexpr int kTokenBytes = formats::Bytes(kScaling.token);
  static constexpr int kBlock = kBlockBytes == 0 ? kMaxRowDim : kScaling.channels;
  // Channels that a lane encodes independently, as a row of that length; 0: one lane encodes the whole row.
  static constexpr int kLaneChannels = kScaling.token != formats::ScaleType::kNone   ? 0
                                       : kScaling.block != formats::ScaleType::kNone ? kScaling.channels
                                                                                     : 8;
  static constexpr bool kIsSearch =
      formats::IsTrellis(Format::kElementType) || formats::IsAllocated(Format::kElementType);
  static constexpr int kWarps = kScaling.channel_bits ? 1 : kIsSearch ? 2 : 4;  // of a block
  static_assert(kElementType.high_bits == 0 || kLaneChannels == 0 ||
                kLaneChannels == 32);  // both sections in whole words

  // A warp's shared memory; of a token group with bits of its own, what is known of its channels comes last.
  static constexpr KVANTA_DEVICE int GroupAt(int head_dim) {
    return kAppendBytes + (kIsSearch ? TrellisMemory::Bytes(head_dim) : 0);
  }
  static constexpr KVANTA_DEVICE int WarpBytes(int head_dim) {
    return GroupAt(head_dim) + (kScaling.channel_bits ? GroupAllocation::Bytes(head_dim) : 0);
  }

  // Number of block scales of `channels` channels.
  static constexpr KVANTA_DEVICE int Blocks(int channels) { return (channels + kBlock - 1) / kBlock; }

  // Encodes the warp's row, f32 at `base`, into the sections after it.
  static KVANTA_DEVICE void Encode(int base, int head_dim, float scale, int lane, formats::EncodeCounts& counts) {
    const int stride = kLaneChannels == 0 ? head_dim : kLaneChannels;
    for (int begin = lane * stride; begin < head_dim; begin += kWarp * stride) {
      const int step = stride < head_dim - begin ? stride : head_dim - begin;
      const int blocks = Blocks(step);
      const auto* x = reinterpret_cast<const float*>(Shared(base + 4 * begin, 4 * step, 4, Access::kRead));
      const int block = begin / kBlock;
      const auto section = [&](int at, int count) { return Shared(base + at, count, 1, Access::kWrite); };
      formats::RowSections out;
      out.codes = section(kCodesAt + begin * kBits / 8, step * kBits / 8);
      if (kBlockBytes != 0) out.block_scales = section(kBlockScalesAt + block * kBlockBytes, blocks * kBlockBytes);
      if (kScaling.block_offset)
        out.block_offsets = section(kBlockOffsetsAt + block * kOffsetBytes, blocks * kOffsetBytes);
      if (kTokenBytes != 0) out.token_scales = section(kTokenScalesAt, kTokenBytes);
      if (kScaling.token_offset) out.token_offsets = section(kTokenOffsetsAt, kOffsetBytes);
      Format::EncodeRow(x, step, scale, out, counts);
    }
  }

  static KVANTA_DEVICE bool IsZero(int at, int bytes) {
    for (int i = 0; i < bytes; ++i) {
      if (LoadShared<uint8_t>(at + i) != 0) return false;
    }
    return true;
  }

  // Counts this lane's scales, and those that are zero.
  static KVANTA_DEVICE void CountZeroScales(int base, int head_dim, int lane, AppendSums& sums) {
    if (kBlockBytes != 0 && kScaling.block != formats::ScaleType::kE8M0 && !kScaling.block_offset) {
      for (int block = lane; block < Blocks(head_dim); block += kWarp) {
        sums.zero_blocks += IsZero(base + kBlockScalesAt + block * kBlockBytes, kBlockBytes) ? 1 : 0;
        ++sums.blocks;
      }
    } else if (kBlockBytes == 0 && kTokenBytes != 0 && kScaling.token != formats::ScaleType::kE8M0 &&
               !kScaling.token_offset && lane == 0) {
      sums.zero_blocks += IsZero(base + kTokenScalesAt, kTokenBytes) ? 1 : 0;
      ++sums.blocks;
    }
  }

  // Shared-memory offset of byte `byte` of the row's codes (the first of a section's word).
  static KVANTA_DEVICE int EncodedCodes(int byte, int head_dim) {
    if constexpr (kElementType.high_bits == 0 || kLaneChannels == 0) {
      return kCodesAt + byte;
    } else {  // low and high section of each block in turn
      constexpr int kLow = kLaneChannels * kElementType.low_bits / 8;
      constexpr int kHigh = kLaneChannels * kElementType.high_bits / 8;
      const int low = head_dim * kElementType.low_bits / 8;
      return kCodesAt + (byte < low ? byte / kLow * (kLow + kHigh) + byte % kLow
                                    : (byte - low) / kHigh * (kLow + kHigh) + kLow + (byte - low) % kHigh);
    }
  }

  // The same of a format whose codes are found by a search.
  static KVANTA_DEVICE void Search(const AppendParams& params, const RowAllocation& allocation, int base, int lane,
                                   formats::EncodeCounts& counts) {
    const TrellisMemory memory(base + kAppendBytes, params.head_dim);
    TrellisEncoder<Format::kElementType>::Encode(params, allocation, base, base + kCodesAt, base + kTokenScalesAt,
                                                 memory, lane, counts);
  }

  // Stores the sections as token `token` of a cell in the cache layout (formats/cell_layout.h), or a canonical one.
  static KVANTA_DEVICE void Store(int base, const AppendParams& params, const CellOffsets& offsets, int token, int lane,
                                  uint8_t* cell) {
    const int head_dim = params.head_dim, page_size = params.page_size;
    const int row_bytes = head_dim * kBits / 8;
    uint8_t* codes = cell + offsets.codes;
    if (params.is_key) {
      const int64_t first =
          params.is_canonical ? int64_t{token} * row_bytes : int64_t{token / 16} * (16 * row_bytes) + token % 16 * 4;
      uint8_t* line = codes + first;
      const int stride = params.is_canonical ? 4 : 64;
      for (int unit = lane; unit < row_bytes / 4; unit += kWarp) {
        *reinterpret_cast<uint32_t*>(line + unit * stride) =
            LoadShared<uint32_t>(base + EncodedCodes(4 * unit, head_dim));
      }
    } else {
      constexpr int kElement = kBits < 8 ? 1 : kBits / 8;
      constexpr int kTokens = 4 / kElement;
      uint8_t* line = codes + token / kTokens * (kTokens * row_bytes) + token % kTokens * kElement;
      for (int i = lane; i < row_bytes / kElement; i += kWarp) {
        for (int byte = 0; byte < kElement; ++byte) {
          line[i * 4 + byte] = LoadShared<uint8_t>(base + EncodedCodes(i * kElement, head_dim) + byte);
        }
      }
    }
    const auto copy_blocks = [&](int64_t to, int from, int bytes) {
      for (int i = lane; i < Blocks(head_dim) * bytes; i += kWarp) {
        const int block = i / bytes;
        const int64_t at =
            params.is_canonical ? int64_t{token} * Blocks(head_dim) + block : int64_t{block} * page_size + token;
        cell[to + at * bytes + i % bytes] = LoadShared<uint8_t>(base + from + i);
      }
    };
    const auto copy_token = [&](int64_t to, int from, int bytes) {
      if (lane < bytes) cell[to + int64_t{token} * bytes + lane] = LoadShared<uint8_t>(base + from + lane);
    };
    if (kBlockBytes != 0) copy_blocks(offsets.block_scales, kBlockScalesAt, kBlockBytes);
    if (kScaling.block_offset) copy_blocks(offsets.block_offsets, kBlockOffsetsAt, kOffsetBytes);
    if (kTokenBytes != 0) copy_token(offsets.token_scales, kTokenScalesAt, kTokenBytes);
    if (kScaling.token_offset) copy_token(offsets.token_offsets, kTokenOffsetsAt, kOffsetBytes);
  }
};

}  // namespace kvanta::kernels::cuda
