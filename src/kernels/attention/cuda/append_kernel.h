// Append: one warp per (row, KV head) transforms the row, encodes it with the format's host/device encoder and stores
// it in the cache layout. Closed pages are quantized the same way from their exact cells; formats whose tokens share
// scales (kivi4, kivi2) are quantized only then. Include the primitives first.
#pragma once

#include <type_traits>

#include "base/math.h"
#include "formats/bf16.h"
#include "formats/format_traits.h"
#include "formats/unsigned_group.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/matrix_rows.h"
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
  static constexpr int kWarps = kIsSearch ? 2 : 4;  // of a block
  static_assert(kElementType.high_bits == 0 || kLaneChannels == 0 ||
                kLaneChannels == 32);  // both sections in whole words

  // A warp's shared memory.
  static constexpr KVANTA_DEVICE int WarpBytes(int head_dim) {
    return kAppendBytes + (kIsSearch ? TrellisMemory::Bytes(head_dim) : 0);
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

  // The same of a format whose codes are found by a search, for a KV head; `search`: its shared memory.
  static KVANTA_DEVICE void Search(const AppendParams& params, int head, int base, int search, int lane,
                                   formats::EncodeCounts& counts) {
    const TrellisMemory memory(search, params.head_dim);
    TrellisEncoder<Format::kElementType>::Encode(params, head, base, base + kCodesAt, base + kTokenScalesAt, memory,
                                                 lane, counts);
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

// One channel of a bf16 cell in the cache layout.
KVANTA_DEVICE float ExactValue(const uint8_t* cell, bool is_key, int head_dim, int token, int channel) {
  const int row_bytes = 2 * head_dim;
  const int64_t offset = is_key ? token / 16 * (16 * row_bytes) + channel / 2 * 64 + token % 16 * 4 + channel % 2 * 2
                                : token / 2 * (2 * row_bytes) + channel * 4 + token % 2 * 2;
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(cell + offset);
  return std::bit_cast<float>(uint32_t{bits} << 16U);
}

// Copies a key row of codes without scales; both records have the same layout.
template <class Format>
KVANTA_DEVICE void CopyKeyRow(const uint8_t* from, uint8_t* to, int head_dim, int token, int lane) {
  const int row_bytes = head_dim * RowEncoder<Format>::kBits / 8;
  const int line = token / 16 * (16 * row_bytes) + token % 16 * 4;
  for (int unit = lane; unit < row_bytes / 4; unit += kWarp) {
    *reinterpret_cast<uint32_t*>(to + line + unit * 64) = *reinterpret_cast<const uint32_t*>(from + line + unit * 64);
  }
}

// Loads a row of K or V to f32 at `base`: mean subtracted, outliers removed (or selected), transformed.
KVANTA_DEVICE void LoadRow(const AppendParams& params, int row, int head, int base, int lane) {
  const float* from = params.rows + row * params.stride + head * params.row_dim;
  const float* mean = params.mean != nullptr ? params.mean + head * params.row_dim : nullptr;
  const int32_t* outliers = params.outliers != nullptr ? params.outliers + head * params.outlier_count : nullptr;
  for (int c = lane; c < params.head_dim; c += kWarp) {
    const int channel = params.is_unquantized && outliers != nullptr ? outliers[c] : c;
    StoreShared(base + 4 * c, mean != nullptr ? from[channel] - mean[channel] : from[channel]);
  }
  SyncWarp();
  if (!params.is_unquantized && outliers != nullptr) {
    for (int i = lane; i < params.outlier_count; i += kWarp) StoreShared(base + 4 * outliers[i], 0.0F);
    SyncWarp();
  }
  if (params.hadamard) HadamardRow(base, params.head_dim, params.hadamard_block, params.hadamard_norm, lane);
  if (params.query_matrices != nullptr) {
    MultiplyRow(base, params.query_matrices + int64_t{head} * params.head_dim * formats::MatrixStride(params.head_dim),
                params.head_dim, lane);
  }
}

// Encodes item `item` of (slots x KV heads) with one warp, whose shared memory starts at `base`.
template <class Format>
KVANTA_DEVICE void AppendRow(const AppendParams& params, const SlotMapping& mapping, int item, int base, int lane,
                             formats::EncodeCounts& counts, AppendSums& sums) {
  const int head = item % params.kv_heads;
  const Slot slot = mapping.slots[item / params.kv_heads];
  const int head_dim = params.head_dim;
  const uint8_t* exact = params.exact.Record(slot.exact) + params.exact_cell.Cell(head) + params.exact_cell.codes;
  const PagePool& pool = params.to_exact ? params.exact : params.quantized;
  const CellOffsets& to = params.to_exact ? params.exact_cell : params.cell;
  uint8_t* cell = pool.Record(params.to_exact ? slot.exact : slot.quantized) + to.Cell(head);
  if (params.from_exact && params.is_unquantized) {
    CopyKeyRow<Format>(exact, cell + to.codes, head_dim, slot.offset, lane);
    return;
  }
  if (params.from_exact) {
    for (int c = lane; c < head_dim; c += kWarp) {
      StoreShared(base + 4 * c, ExactValue(exact, params.is_key, head_dim, slot.offset, c));
    }
    SyncWarp();
  } else {
    LoadRow(params, slot.row, head, base, lane);
  }
  if constexpr (RowEncoder<Format>::kIsSearch) {
    RowEncoder<Format>::Search(params, head, base, base + kAppendBytes, lane, counts);
  } else {
    RowEncoder<Format>::Encode(base, head_dim, params.scale[head], lane, counts);
  }
  SyncWarp();
  if (!params.to_exact) RowEncoder<Format>::CountZeroScales(base, head_dim, lane, sums);
  RowEncoder<Format>::Store(base, params, to, slot.offset, lane, cell);
}

// A block in a grid-stride loop over rows, one per warp at a time.
template <class Format>
KVANTA_DEVICE void AppendRows(const AppendParams& params, int block, int blocks) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const SlotMapping mapping = *params.slot_mapping;
  formats::EncodeCounts counts;
  AppendSums sums;
  constexpr int kWarps = RowEncoder<Format>::kWarps;
  const int base = warp * RowEncoder<Format>::WarpBytes(params.head_dim);
  for (int item = block * kWarps + warp; item < mapping.count * params.kv_heads; item += blocks * kWarps) {
    AppendRow<Format>(params, mapping, item, base, lane, counts, sums);
    SyncWarp();
  }
  // Values and NaN of a closed page were counted when they were written; outliers are part of K's values.
  const bool counted = params.from_exact || (params.is_unquantized && params.outliers != nullptr);
  if (!counted && counts.values != 0) AtomicAdd(&params.sums->values, counts.values);
  if (!params.from_exact && counts.nan != 0) AtomicAdd(&params.sums->nan, counts.nan);
  if (counts.saturated != 0) AtomicAdd(&params.sums->saturated, counts.saturated);
  if (sums.blocks != 0) AtomicAdd(&params.sums->blocks, sums.blocks);
  if (sums.zero_blocks != 0) AtomicAdd(&params.sums->zero_blocks, sums.zero_blocks);
}

// One warp quantizes 32 tokens of a closed page with per-channel scales: each lane first encodes channels, then packs
// one token's codes. Fields [32][head_dim] are in shared memory.
template <class Format>
KVANTA_DEVICE void QuantizeTokenGroup(const AppendParams& params, const SlotMapping& mapping, int item, int lane,
                                      formats::EncodeCounts& counts) {
  constexpr int kTokenGroup = Format::kTokenGroup;
  constexpr int kBits = formats::CodeBits(Format::kElementType);
  static_assert(kTokenGroup == kWarp);
  const int head = item % params.kv_heads;
  const Slot slot = mapping.slots[item / params.kv_heads * kTokenGroup];
  const int head_dim = params.head_dim;
  const uint8_t* exact = params.exact.Record(slot.exact) + params.exact_cell.Cell(head) + params.exact_cell.codes;
  uint8_t* cell = params.quantized.Record(slot.quantized) + params.cell.Cell(head);
  const auto channel_field = [&](int64_t section, int channel) {
    return reinterpret_cast<uint16_t*>(cell + section) + slot.offset / kTokenGroup * head_dim + channel;
  };
  for (int channel = lane; channel < head_dim; channel += kWarp) {
    float x[kTokenGroup];
    uint8_t fields[kTokenGroup];
    for (int token = 0; token < kTokenGroup; ++token) {
      x[token] = ExactValue(exact, params.is_key, head_dim, slot.offset + token, channel);
    }
    const formats::AsymmetricScale scale = formats::EncodeGroup<kBits>(x, kTokenGroup, 1, fields, counts);
    *channel_field(params.cell.channel_scales, channel) = scale.scale;
    *channel_field(params.cell.channel_offsets, channel) = scale.offset;
    for (int token = 0; token < kTokenGroup; ++token) StoreShared(token * head_dim + channel, fields[token]);
  }
  SyncWarp();
  constexpr int kUnitChannels = 32 / kBits;
  const int token = slot.offset + lane;
  const int row_bytes = head_dim * kBits / 8;
  uint8_t* line = cell + params.cell.codes + token / 16 * (16 * row_bytes) + token % 16 * 4;
  for (int unit = 0; unit < row_bytes / 4; ++unit) {
    uint8_t bytes[4];
    formats::PackPlane<kBits>(Shared(lane * head_dim + unit * kUnitChannels, kUnitChannels, 1, Access::kRead),
                              kUnitChannels, 0, bytes);
    for (int byte = 0; byte < 4; ++byte) line[unit * 64 + byte] = bytes[byte];
  }
}

// A block of one warp, in a grid-stride loop over token groups.
template <class Format>
KVANTA_DEVICE void QuantizeTokenGroups(const AppendParams& params, int block, int blocks) {
  const SlotMapping mapping = *params.slot_mapping;
  formats::EncodeCounts counts;
  for (int item = block; item < mapping.count / Format::kTokenGroup * params.kv_heads; item += blocks) {
    QuantizeTokenGroup<Format>(params, mapping, item, ThreadIndex(), counts);
    SyncWarp();
  }
  if (counts.saturated != 0) AtomicAdd(&params.sums->saturated, counts.saturated);
}

// Grid and block function that encode rows or closed pages to `Format`.
template <class Format>
struct AppendKernel {
  static constexpr int kTokenGroup = Format::kScaling.token_group;
  using Encoder = RowEncoder<std::conditional_t<kTokenGroup != 0, formats::Bf16, Format>>;  // of single rows
  static constexpr int kWarps = kTokenGroup != 0 ? 1 : Encoder::kWarps;
  static constexpr int kThreads = kWarps * kWarp;

  // The slot count is often far below max_slots, so the grid is kept small. Sides have as many blocks each.
  static LaunchShape Shape(const AppendSides& sides, int max_blocks) {
    const AppendParams& params = sides.sides[0];
    const int64_t needed = kTokenGroup != 0 ? int64_t{params.max_slots} / kTokenGroup * params.kv_heads
                                            : CeilDiv(int64_t{params.max_slots} * params.kv_heads, kWarps);
    const int shared_bytes = kTokenGroup != 0 ? kTokenGroup * kMaxRowDim : kWarps * Encoder::WarpBytes(params.head_dim);
    return {sides.count * (needed < max_blocks ? needed : max_blocks), kThreads, shared_bytes};
  }
  static KVANTA_DEVICE void Run(const AppendSides& sides) {
    const AppendParams& params = sides.sides[BlockIndex() % sides.count];
    const int block = BlockIndex() / sides.count, blocks = Blocks() / sides.count;
    if constexpr (kTokenGroup != 0) {
      QuantizeTokenGroups<Format>(params, block, blocks);
    } else {
      AppendRows<Format>(params, block, blocks);
    }
  }
};

}  // namespace kvanta::kernels::cuda
