// Append: one warp for each (row, KV head) of a side transforms the row, encodes it by the format's own source and
// stores it in the cache's layout. Pages that close go the same way, from their exact cells; where tokens share scales
// (kivi4, kivi2), that is the only way. A unit that includes this has included the primitives.
#pragma once

#include "formats/format_traits.h"
#include "formats/unsigned_group.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/launch.h"

namespace kvanta::kernels::cuda {

inline constexpr int kAppendWarps = 4;
inline constexpr int kLongestHead = kMaxLatentRank;

// A warp's shared memory: the row, and the planes that it is encoded to.
inline constexpr int kAppendRowBytes = 4 * kLongestHead;
inline constexpr int kCodesAt = kAppendRowBytes;
inline constexpr int kBlockScalesAt = kCodesAt + 4 * kLongestHead;
inline constexpr int kBlockOffsetsAt = kBlockScalesAt + kLongestHead;
inline constexpr int kTokenScalesAt = kBlockOffsetsAt + kLongestHead;
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
  static constexpr int kBlock = kBlockBytes == 0 ? kLongestHead : kScaling.channels;  // none is as one that never ends
  // Channels that a lane may encode on their own, as a row of that length; 0: the row is encoded as one.
  static constexpr int kAlone = kScaling.token != formats::ScaleType::kNone   ? 0
                                : kScaling.block != formats::ScaleType::kNone ? kScaling.channels
                                                                              : 8;
  static_assert(kElementType.high_bits == 0 || kAlone == 0 || kAlone == 32);  // both planes in whole words

  // Scales of so many channels; a short row has one.
  static constexpr KVANTA_DEVICE int Blocks(int channels) { return (channels + kBlock - 1) / kBlock; }

  // Encodes the warp's row, f32 at `base`, into the planes behind it.
  static KVANTA_DEVICE void Encode(int base, int head_dim, float scale, int lane, formats::EncodeCounts& counts) {
    const int stride = kAlone == 0 ? head_dim : kAlone;
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

  // Scales that are zero, among this lane's.
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

  // Where byte `byte` of the row's codes, the first of a plane's word, lies among those that lanes have encoded.
  static KVANTA_DEVICE int CodesFrom(int byte, int head_dim) {
    if constexpr (kElementType.high_bits == 0 || kAlone == 0) {
      return kCodesAt + byte;
    } else {  // a block's planes, one after the other
      constexpr int kLow = kAlone * kElementType.low_bits / 8;
      constexpr int kHigh = kAlone * kElementType.high_bits / 8;
      const int low = head_dim * kElementType.low_bits / 8;
      return kCodesAt + (byte < low ? byte / kLow * (kLow + kHigh) + byte % kLow
                                    : (byte - low) / kHigh * (kLow + kHigh) + kLow + (byte - low) % kHigh);
    }
  }

  // The planes to slot `slot` of a cell in the cache's layout (formats/cell_layout.h).
  static KVANTA_DEVICE void Store(int base, const CellPlace& place, bool is_key, int head_dim, int page_size, int slot,
                                  int lane, uint8_t* cell) {
    const int row_bytes = head_dim * kBits / 8;
    uint8_t* codes = cell + place.codes;
    if (is_key) {
      uint8_t* line = codes + slot / 16 * (16 * row_bytes) + slot % 16 * 4;
      for (int unit = lane; unit < row_bytes / 4; unit += kWarp) {
        *reinterpret_cast<uint32_t*>(line + unit * 64) = LoadShared<uint32_t>(base + CodesFrom(4 * unit, head_dim));
      }
    } else {
      constexpr int kElement = kBits < 8 ? 1 : kBits / 8;
      constexpr int kTokens = 4 / kElement;
      uint8_t* line = codes + slot / kTokens * (kTokens * row_bytes) + slot % kTokens * kElement;
      for (int i = lane; i < row_bytes / kElement; i += kWarp) {
        for (int byte = 0; byte < kElement; ++byte) {
          line[i * 4 + byte] = LoadShared<uint8_t>(base + CodesFrom(i * kElement, head_dim) + byte);
        }
      }
    }
    const auto blocks = [&](int64_t to, int from, int bytes) {
      for (int i = lane; i < Blocks(head_dim) * bytes; i += kWarp) {
        const int block = i / bytes;
        cell[to + (int64_t{block} * page_size + slot) * bytes + i % bytes] = LoadShared<uint8_t>(base + from + i);
      }
    };
    const auto token = [&](int64_t to, int from, int bytes) {
      if (lane < bytes) cell[to + int64_t{slot} * bytes + lane] = LoadShared<uint8_t>(base + from + lane);
    };
    if (kBlockBytes != 0) blocks(place.block_scales, kBlockScalesAt, kBlockBytes);
    if (kScaling.block_offset) blocks(place.block_offsets, kBlockOffsetsAt, kOffsetBytes);
    if (kTokenBytes != 0) token(place.token_scales, kTokenScalesAt, kTokenBytes);
    if (kScaling.token_offset) token(place.token_offsets, kTokenOffsetsAt, kOffsetBytes);
  }
};

// The row of an exact cell: bf16, in the cache's layout.
KVANTA_DEVICE float ExactValue(const uint8_t* cell, bool is_key, int head_dim, int slot, int channel) {
  const int row_bytes = 2 * head_dim;
  const int64_t offset = is_key ? slot / 16 * (16 * row_bytes) + channel / 2 * 64 + slot % 16 * 4 + channel % 2 * 2
                                : slot / 2 * (2 * row_bytes) + channel * 4 + slot % 2 * 2;
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(cell + offset);
  return std::bit_cast<float>(uint32_t{bits} << 16U);
}

// Codes without scales, in the same layout of both records.
template <class Format>
KVANTA_DEVICE void CopyKeyRow(const uint8_t* from, uint8_t* to, int head_dim, int slot, int lane) {
  const int row_bytes = head_dim * RowEncoder<Format>::kBits / 8;
  const int line = slot / 16 * (16 * row_bytes) + slot % 16 * 4;
  for (int unit = lane; unit < row_bytes / 4; unit += kWarp) {
    *reinterpret_cast<uint32_t*>(to + line + unit * 64) = *reinterpret_cast<const uint32_t*>(from + line + unit * 64);
  }
}

// The row of K or V in f32, transformed, at `base`.
KVANTA_DEVICE void TakeRow(const AppendParams& side, int row, int head, int base, int lane) {
  const float* from = side.rows + row * side.stride + head * side.row_dim;
  const float* mean = side.mean != nullptr ? side.mean + head * side.row_dim : nullptr;
  const int32_t* outliers = side.outliers != nullptr ? side.outliers + head * side.outlier_count : nullptr;
  for (int c = lane; c < side.head_dim; c += kWarp) {
    const int channel = side.is_unquantized && outliers != nullptr ? outliers[c] : c;
    StoreShared(base + 4 * c, mean != nullptr ? from[channel] - mean[channel] : from[channel]);
  }
  SyncWarp();
  if (!side.is_unquantized && outliers != nullptr) {
    for (int i = lane; i < side.outlier_count; i += kWarp) StoreShared(base + 4 * outliers[i], 0.0F);
    SyncWarp();
  }
  if (side.hadamard) HadamardRow(base, side.head_dim, side.hadamard_block, side.hadamard_norm, lane);
}

// Encodes row `item` of the list's rows and KV heads, by the warp whose shared memory is at `base`.
template <class Format>
KVANTA_DEVICE void AppendRow(const AppendParams& side, const SlotMapping& list, int item, int base, int lane,
                             formats::EncodeCounts& counts, AppendSums& sums) {
  const int head = item % side.kv_heads;
  const Slot place = list.places[item / side.kv_heads];
  const int head_dim = side.head_dim;
  const uint8_t* exact = side.exact.base + place.exact * side.exact.bytes + side.exact_cell.first +
                         head * side.exact_cell.stride + side.exact_cell.codes;
  const Records& records = side.to_exact ? side.exact : side.quantized;
  const CellPlace& to = side.to_exact ? side.exact_cell : side.cell;
  uint8_t* cell =
      records.base + (side.to_exact ? place.exact : place.quantized) * records.bytes + to.first + head * to.stride;
  if (side.from_exact && side.is_unquantized) {
    CopyKeyRow<Format>(exact, cell + to.codes, head_dim, place.slot, lane);
    return;
  }
  if (side.from_exact) {
    for (int c = lane; c < head_dim; c += kWarp) {
      StoreShared(base + 4 * c, ExactValue(exact, side.is_key, head_dim, place.slot, c));
    }
    SyncWarp();
  } else {
    TakeRow(side, place.row, head, base, lane);
  }
  RowEncoder<Format>::Encode(base, head_dim, side.scale[head], lane, counts);
  SyncWarp();
  if (!side.to_exact) RowEncoder<Format>::CountZeroScales(base, head_dim, lane, sums);
  RowEncoder<Format>::Store(base, to, side.is_key, head_dim, side.page_size, place.slot, lane, cell);
}

// A block of kAppendWarps warps, kAppendBytes of shared memory each, which take rows by turns. `Format`: what they are
// encoded to.
template <class Format>
KVANTA_DEVICE void AppendBlock(const AppendParams& side) {
  const int lane = ThreadIndex() % kWarp;
  const int warp = ThreadIndex() / kWarp;
  const SlotMapping list = *side.list;
  formats::EncodeCounts counts;
  AppendSums sums;
  for (int item = BlockIndex() * kAppendWarps + warp; item < list.count * side.kv_heads;
       item += Blocks() * kAppendWarps) {
    AppendRow<Format>(side, list, item, warp * kAppendBytes, lane, counts, sums);
    SyncWarp();
  }
  // Of a page that closes, values and NaN were counted when they were written; outliers count among K's values.
  const bool counted = side.from_exact || (side.is_unquantized && side.outliers != nullptr);
  if (!counted && counts.values != 0) AtomicAdd(&side.sums->values, counts.values);
  if (!side.from_exact && counts.nan != 0) AtomicAdd(&side.sums->nan, counts.nan);
  if (counts.saturated != 0) AtomicAdd(&side.sums->saturated, counts.saturated);
  if (sums.blocks != 0) AtomicAdd(&side.sums->blocks, sums.blocks);
  if (sums.zero_blocks != 0) AtomicAdd(&side.sums->zero_blocks, sums.zero_blocks);
}

// A warp for 32 tokens of a page that closes, whose channels have scales of their own: lane by lane a channel's fields,
// then a token's codes. Fields [32][head_dim] in shared memory.
template <class Format>
KVANTA_DEVICE void QuantizeTokenGroup(const AppendParams& side, const SlotMapping& list, int item, int lane,
                                      formats::EncodeCounts& counts) {
  constexpr int kTokenGroup = Format::kTokenGroup;
  constexpr int kBits = formats::CodeBits(Format::kElementType);
  static_assert(kTokenGroup == kWarp);
  const int head = item % side.kv_heads;
  const Slot place = list.places[item / side.kv_heads * kTokenGroup];
  const int head_dim = side.head_dim;
  const uint8_t* exact = side.exact.base + place.exact * side.exact.bytes + side.exact_cell.first +
                         head * side.exact_cell.stride + side.exact_cell.codes;
  uint8_t* cell =
      side.quantized.base + place.quantized * side.quantized.bytes + side.cell.first + head * side.cell.stride;
  const auto shared = [&](int64_t section, int channel) {
    return reinterpret_cast<uint16_t*>(cell + section) + place.slot / kTokenGroup * head_dim + channel;
  };
  for (int channel = lane; channel < head_dim; channel += kWarp) {
    float x[kTokenGroup];
    uint8_t fields[kTokenGroup];
    for (int token = 0; token < kTokenGroup; ++token) {
      x[token] = ExactValue(exact, side.is_key, head_dim, place.slot + token, channel);
    }
    const formats::AsymmetricScale scale = formats::EncodeGroup<kBits>(x, kTokenGroup, 1, fields, counts);
    *shared(side.cell.channel_scales, channel) = scale.scale;
    *shared(side.cell.channel_offsets, channel) = scale.offset;
    for (int token = 0; token < kTokenGroup; ++token) StoreShared(token * head_dim + channel, fields[token]);
  }
  SyncWarp();
  constexpr int kUnitChannels = 32 / kBits;
  const int slot = place.slot + lane;
  const int row_bytes = head_dim * kBits / 8;
  uint8_t* line = cell + side.cell.codes + slot / 16 * (16 * row_bytes) + slot % 16 * 4;
  for (int unit = 0; unit < row_bytes / 4; ++unit) {
    uint8_t bytes[4];
    formats::PackPlane<kBits>(Shared(lane * head_dim + unit * kUnitChannels, kUnitChannels, 1, Access::kRead),
                              kUnitChannels, 0, bytes);
    for (int byte = 0; byte < 4; ++byte) line[unit * 64 + byte] = bytes[byte];
  }
}

// A block of one warp, which takes tiles by turns.
template <class Format>
KVANTA_DEVICE void QuantizeTokenGroups(const AppendParams& side) {
  const SlotMapping list = *side.list;
  formats::EncodeCounts counts;
  for (int item = BlockIndex(); item < list.count / Format::kTokenGroup * side.kv_heads; item += Blocks()) {
    QuantizeTokenGroup<Format>(side, list, item, ThreadIndex(), counts);
    SyncWarp();
  }
  if (counts.saturated != 0) AtomicAdd(&side.sums->saturated, counts.saturated);
}

// The grid that rows, or a page that closes, are encoded to `Format` by.
template <class Format>
struct AppendGrid {
  static constexpr int kTokenGroup = Format::kScaling.token_group;
  static constexpr int kThreads = kTokenGroup != 0 ? kWarp : kAppendWarps * kWarp;
  static constexpr int kSharedBytes = kTokenGroup != 0 ? kTokenGroup * kLongestHead : kAppendWarps * kAppendBytes;

  // A list is often shorter than `most`, and then nearly all blocks have nothing to do: so there are few.
  static LaunchShape Shape(const AppendParams& side, int max_blocks) {
    const int needed = kTokenGroup != 0 ? side.limit / kTokenGroup * side.kv_heads
                                        : (side.limit * side.kv_heads + kAppendWarps - 1) / kAppendWarps;
    return {needed < max_blocks ? needed : max_blocks, kThreads, kSharedBytes};
  }
  static KVANTA_DEVICE void Run(const AppendParams& side) {
    if constexpr (kTokenGroup != 0) {
      QuantizeTokenGroups<Format>(side);
    } else {
      AppendBlock<Format>(side);
    }
  }
};

}  // namespace kvanta::kernels::cuda
