// Append: one warp per (row, KV head) transforms the row, encodes it with the format's host/device encoder and stores
// it in the cache layout. Closed pages are quantized the same way from their exact cells; formats whose tokens share
// scales (kivi4, kivi2; klt3_g64, klt2_g64) are quantized only then. Norms and RoPE of keys are part of the transform,
// those of queries are further warps' work. Include the primitives first.
#pragma once

#include <type_traits>

#include "formats/bf16.h"
#include "formats/unsigned_group.h"
#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/hadamard_rows.h"
#include "kernels/attention/cuda/head_rows.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/matrix_rows.h"
#include "kernels/attention/cuda/row_encoder.h"

namespace kvanta::kernels::cuda {

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

// Loads a row of K or V to f32 at `base`: norm and RoPE, mean subtracted, outliers removed (or selected), transformed.
// Outliers come without norm and RoPE.
KVANTA_DEVICE_CALL void LoadRow(const AppendParams& params, int row, int head, int base, int lane) {
  const float* from = params.rows + row * params.stride + head * params.row_dim;
  const float* mean = params.mean != nullptr ? params.mean + head * params.row_dim : nullptr;
  const int32_t* outliers = params.outliers != nullptr ? params.outliers + head * params.outlier_count : nullptr;
  if (TransformsHeads(params.heads)) {
    LoadHead(params.heads, from, row, head, params.head_dim, base, lane);
    for (int c = lane; mean != nullptr && c < params.head_dim; c += kWarp) {
      StoreShared(base + 4 * c, LoadShared<float>(base + 4 * c) - mean[c]);
    }
  } else {
    for (int c = lane; c < params.head_dim; c += kWarp) {
      const int channel = params.is_unquantized && outliers != nullptr ? outliers[c] : c;
      StoreShared(base + 4 * c, mean != nullptr ? from[channel] - mean[channel] : from[channel]);
    }
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

// True if a row of a closed page is one of the launch's new rows, which are not in exact cells yet.
KVANTA_DEVICE bool IsNew(const AppendParams& params, const Slot& slot) {
  return params.slot_mapping != nullptr && slot.row >= 0;
}

// Rows that a launch encodes: new ones, to quantized or exact records, or those of closed pages.
enum class AppendTask : uint8_t { kNew, kNewExact, kClosed };

// Encodes item `item` of (slots x KV heads) with one warp, whose shared memory starts at `base`.
template <class Format, AppendTask kTask>
KVANTA_DEVICE void AppendRow(const AppendParams& params, const Slot& slot, int head, int base, int lane,
                             formats::EncodeCounts& counts, AppendSums& sums) {
  constexpr bool kToExact = kTask == AppendTask::kNewExact;
  const int head_dim = params.head_dim;
  const uint8_t* exact = params.exact.Record(slot.exact) + params.exact_cell.Cell(head) + params.exact_cell.codes;
  const PagePool& pool = kToExact ? params.exact : params.quantized;
  const CellOffsets& to = kToExact ? params.exact_cell : params.cell;
  uint8_t* cell = pool.Record(kToExact ? slot.exact : slot.quantized) + to.Cell(head);
  if (kTask == AppendTask::kClosed && !IsNew(params, slot)) {
    if (params.is_unquantized) {
      CopyKeyRow<Format>(exact, cell + to.codes, head_dim, slot.offset, lane);
      return;
    }
    for (int c = lane; c < head_dim; c += kWarp) {
      StoreShared(base + 4 * c, ExactValue(exact, params.is_key, head_dim, slot.offset, c));
    }
    SyncWarp();
  } else {
    LoadRow(params, slot.row, head, base, lane);
    if (kTask == AppendTask::kClosed && !params.is_unquantized) {
      for (int c = lane; c < head_dim; c += kWarp) {
        const uint16_t bits = formats::Bf16::Encode(LoadShared<float>(base + 4 * c));
        StoreShared(base + 4 * c, std::bit_cast<float>(uint32_t{bits} << 16U));
      }
      SyncWarp();
    }
  }
  if constexpr (RowEncoder<Format>::kIsSearch) {
    const RowAllocation allocation =
        params.allocations != nullptr ? RowAllocation(params.allocations[head]) : RowAllocation();
    RowEncoder<Format>::Search(params, allocation, base, lane, counts);
  } else {
    RowEncoder<Format>::Encode(base, head_dim, params.scale[head], lane, counts);
  }
  SyncWarp();
  if (!kToExact) RowEncoder<Format>::CountZeroScales(base, head_dim, lane, sums);
  RowEncoder<Format>::Store(base, params, to, slot.offset, lane, cell);
}

// A block's share of rows: the index of its warp among all, and their number; `base`: the warp's shared memory.
struct WarpShare {
  int first = 0;
  int warps = 0;
  int base = 0;
};

// Writes the new rows among `count` of a closed page to its exact cells: the bytes that another warp writes, whose time
// is not known.
KVANTA_DEVICE void StoreNewRows(const AppendParams& params, const Slot* slots, int count, int head, int base,
                                int lane) {
  for (int i = 0; i < count; ++i) {
    if (!IsNew(params, slots[i])) continue;
    formats::EncodeCounts counted_by_other;
    AppendSums sums;
    AppendRow<formats::Bf16, AppendTask::kNewExact>(params, slots[i], head, base, lane, counted_by_other, sums);
    SyncWarp();
  }
}

// Encodes slot `index`, a row of a closed page whose token group has bits of its own, which each warp finds for itself.
template <class Format>
KVANTA_DEVICE void AppendGroupRow(const AppendParams& params, const SlotMapping& mapping, int index, int head, int base,
                                  int lane, formats::EncodeCounts& counts) {
  constexpr int kTokenGroup = Format::kScaling.token_group;
  const Slot slot = mapping.slots[index];
  const int head_dim = params.head_dim;
  const int in_group = slot.offset % kTokenGroup, first = slot.offset - in_group;
  StoreNewRows(params, mapping.slots + (index - in_group), kTokenGroup, head, base, lane);
  const uint8_t* exact = params.exact.Record(slot.exact) + params.exact_cell.Cell(head) + params.exact_cell.codes;
  uint8_t* cell = params.quantized.Record(slot.quantized) + params.cell.Cell(head);
  GroupAllocation group(params, base + RowEncoder<Format>::GroupAt(head_dim), lane);
  group.Find(params.allocations[head].deviation, RowEncoder<Format>::kBits, base, [&](int token, int channel) {
    return ExactValue(exact, params.is_key, head_dim, first + token, channel);
  });
  if (in_group == 0) group.StoreSection(cell + params.cell.channel_scales, first / kTokenGroup);
  for (int code = lane; code < head_dim; code += kWarp) {
    const float x = ExactValue(exact, params.is_key, head_dim, slot.offset, group.Channel(code));
    StoreShared(base + 4 * code, x * group.LevelsOfUnit(code));
  }
  SyncWarp();
  RowEncoder<Format>::Search(params, group.Row(), base, lane, counts);
  SyncWarp();
  RowEncoder<Format>::Store(base, params, params.cell, slot.offset, lane, cell);
}

// A warp in a grid-stride loop over rows.
template <class Format, AppendTask kTask>
KVANTA_DEVICE void AppendRows(const AppendParams& params, const SlotMapping* slots, const WarpShare& share) {
  if (slots == nullptr) return;
  const int lane = ThreadIndex() % kWarp;
  const SlotMapping mapping = *slots;
  formats::EncodeCounts counts;
  AppendSums sums;
  for (int item = share.first; item < mapping.count * params.kv_heads; item += share.warps) {
    const int slot = item / params.kv_heads, head = item % params.kv_heads;
    if constexpr (Format::kScaling.channel_bits) {
      AppendGroupRow<Format>(params, mapping, slot, head, share.base, lane, counts);
    } else {
      AppendRow<Format, kTask>(params, mapping.slots[slot], head, share.base, lane, counts, sums);
    }
    SyncWarp();
  }
  // Values of a closed page were counted when they were written; outliers are part of K's values.
  constexpr bool kClosed = kTask == AppendTask::kClosed;
  const bool counted = kClosed || (params.is_unquantized && params.outliers != nullptr);
  if (!counted && counts.values != 0) AtomicAdd(&params.sums->values, counts.values);
  if (!kClosed && counts.nan != 0) AtomicAdd(&params.sums->nan, counts.nan);
  if (!(kClosed && params.is_unquantized) && counts.saturated != 0) {
    AtomicAdd(&params.sums->saturated, counts.saturated);
  }
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
  const Slot* const slots = mapping.slots + int64_t{item / params.kv_heads} * kTokenGroup;
  const Slot slot = slots[0];
  const int head_dim = params.head_dim;
  const uint8_t* exact = params.exact.Record(slot.exact) + params.exact_cell.Cell(head) + params.exact_cell.codes;
  uint8_t* cell = params.quantized.Record(slot.quantized) + params.cell.Cell(head);
  StoreNewRows(params, slots, kTokenGroup, head, 0, lane);
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
KVANTA_DEVICE void QuantizeTokenGroups(const AppendParams& params, const WarpShare& share) {
  if (params.closed_mapping == nullptr) return;
  const SlotMapping mapping = *params.closed_mapping;
  formats::EncodeCounts counts;
  const int items = mapping.count / Format::kTokenGroup * params.kv_heads;
  for (int item = share.first; item < items; item += share.warps) {
    QuantizeTokenGroup<Format>(params, mapping, item, ThreadIndex(), counts);
    SyncWarp();
  }
  if (counts.saturated != 0) AtomicAdd(&params.sums->saturated, counts.saturated);
}

// Grid and block function that encode rows or closed pages: keys to `Keys`, values to `Values`.
template <class Keys, class Values = Keys>
struct AppendKernel {
  template <class Format>  // tokens that a warp encodes at once, or 0: one
  static constexpr int kTokens = Format::kScaling.channel_bits ? 0 : Format::kScaling.token_group;
  static constexpr int kTokenGroup = kTokens<Keys>;
  template <class Format>  // of single rows
  using Encoder = RowEncoder<std::conditional_t<kTokens<Format> != 0, formats::Bf16, Format>>;
  static constexpr int kWarps = kTokenGroup != 0 ? 1 : Encoder<Keys>::kWarps;
  static constexpr int kThreads = kWarps * kWarp;

  // The slot counts are often far below their bounds, so the grid is kept small. Sides have as many blocks each.
  static LaunchShape Shape(const AppendSides& sides) {
    const int64_t blocks = sides.count * SideBlocks(sides) + QueryBlocks(sides);
    const int bytes = kWarps * WarpBytes(sides), group_bytes = kTokenGroup * kMaxRowDim;
    return {blocks, kThreads, bytes > group_bytes ? bytes : group_bytes};
  }
  static KVANTA_DEVICE void Run(const AppendSides& sides) {
    const int warp = ThreadIndex() / kWarp;
    const auto share_of = [&](int block, int64_t blocks) {
      return WarpShare{
          .first = block * kWarps + warp, .warps = static_cast<int>(blocks) * kWarps, .base = warp * WarpBytes(sides)};
    };
    const int64_t side_blocks = SideBlocks(sides);
    const auto first_query = static_cast<int>(sides.count * side_blocks);
    if (BlockIndex() >= first_query) {
      return TransformQueries(sides.queries, share_of(BlockIndex() - first_query, QueryBlocks(sides)));
    }
    const AppendParams& params = sides.sides[BlockIndex() % sides.count];
    const WarpShare share = share_of(BlockIndex() / sides.count, side_blocks);
    if (params.to_exact) {
      AppendRows<formats::Bf16, AppendTask::kNewExact>(params, params.slot_mapping, share);
    }
    if (std::is_same_v<Keys, Values> || params.is_key) {
      Encode<Keys>(params, share);
    } else {
      Encode<Values>(params, share);
    }
  }

 private:
  template <class Format>
  static KVANTA_DEVICE void Encode(const AppendParams& params, const WarpShare& share) {
    if constexpr (kTokens<Format> != 0) {
      QuantizeTokenGroups<Format>(params, share);
    } else {
      if constexpr (!Format::kScaling.channel_bits) {
        if (!params.to_exact) AppendRows<Format, AppendTask::kNew>(params, params.slot_mapping, share);
      }
      AppendRows<Format, AppendTask::kClosed>(params, params.closed_mapping, share);
    }
  }
  static constexpr KVANTA_DEVICE int WarpBytes(const AppendSides& sides) {
    const int head_dim = sides.sides[0].head_dim;
    const int keys = Encoder<Keys>::WarpBytes(head_dim), values = Encoder<Values>::WarpBytes(head_dim);
    return keys > values ? keys : values;
  }
  static KVANTA_DEVICE void TransformQueries(const QueryHeads& queries, const WarpShare& share) {
    for (int item = share.first; item < queries.rows * queries.heads; item += share.warps) {
      const int row = item / queries.heads, head = item % queries.heads;
      float* const x = queries.q + row * queries.stride + int64_t{head} * queries.head_dim;
      TransformHead(queries.transform, x, row, head, queries.head_dim, share.base, ThreadIndex() % kWarp);
    }
  }
  static constexpr KVANTA_DEVICE int64_t Blocks(const AppendSides& sides, int64_t warps) {
    const int64_t blocks = (warps + kWarps - 1) / kWarps;
    return blocks < sides.max_blocks ? blocks : sides.max_blocks;
  }
  static constexpr KVANTA_DEVICE int64_t SideBlocks(const AppendSides& sides) {
    const AppendParams& params = sides.sides[0];
    constexpr int kRows = kTokens<Values> == 0 ? 1 : kTokenGroup;
    return Blocks(sides, (params.max_slots + int64_t{params.max_closed_slots / kRows}) * params.kv_heads);
  }
  static constexpr KVANTA_DEVICE int64_t QueryBlocks(const AppendSides& sides) {
    return Blocks(sides, int64_t{sides.queries.rows} * sides.queries.heads);
  }
};

// The kernel of an entry of AppendKernels.
template <class Listed>
struct AppendKernelFor {
  using Type = AppendKernel<Listed>;
};
template <class Keys, class Values>
struct AppendKernelFor<EncoderPair<Keys, Values>> {
  using Type = AppendKernel<Keys, Values>;
};
template <class Listed>
using AppendKernelOf = typename AppendKernelFor<Listed>::Type;

}  // namespace kvanta::kernels::cuda
