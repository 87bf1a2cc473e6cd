// Attention of a tile to one chunk by a warp: logits, online softmax and weighted values. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/chunk_stream.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

template <class Kernel, class Stream = ChunkStream<Kernel>>
struct ChunkAttention {
  using KeyTypes = typename Kernel::KeyTypes;
  using ValueTypes = typename Kernel::ValueTypes;
  using Outputs = typename Kernel::Outputs;
  static constexpr bool kUnrolled = Outputs::kUnrolled;
  static constexpr int kRowTiles = Outputs::kRowTiles;

  // Loads a tile's query rows to shared memory, and packs them as operands; needs a block barrier before, between and
  // after.
  static KVANTA_DEVICE void LoadQueries(const AttentionParams& params, const QueryTile& tile, const TileMemory& memory,
                                        int head_dim) {
    QueryRows::Load<kRowTiles, Kernel::kHasUnquantized>(params, tile, head_dim, memory.rows, memory.scales, memory.bias,
                                                        memory.sums, memory.unquantized_rows);
  }
  static KVANTA_DEVICE void PackQueries(const AttentionParams& params, const TileMemory& memory, int head_dim) {
    KeyTypes::Visit(params.k_type.decode, params.k_type, [&](auto type) {
      QueryRows::Pack<decltype(type), kRowTiles, Stream::kQueriesOnM>(head_dim, memory.rows, memory.scales,
                                                                      memory.queries);
    });
    if (Kernel::kHasExact && params.exact.base != nullptr) {
      QueryRows::Pack<StaticKvType<formats::Bf16>, kRowTiles>(head_dim, memory.rows, memory.scales,
                                                              memory.exact_queries);
    }
    if (Kernel::kHasUnquantized && params.unquantized_dim != 0) {
      QueryRows::Pack<StaticKvType<formats::Bf16>, kRowTiles>(params.unquantized_dim, memory.unquantized_rows,
                                                              memory.scales, memory.unquantized_queries);
    }
  }
  // Loads the levels of trellis codes; needs a block barrier after it.
  static KVANTA_DEVICE void LoadLevels(const AttentionParams& params, int kv_head, const TileMemory& memory) {
    constexpr int kThreads = kAttendWarps * kWarp;
    if (KeyTypes::kHasTrellis && params.k_levels != nullptr) {
      const bool of_head = params.k_allocations != nullptr && !params.k_type.scaling.channel_bits;
      SharedLevels::Load(params.k_type.decode, params.k_levels, of_head ? params.k_allocations + kv_head : nullptr,
                         memory.key_levels, ThreadIndex(), kThreads);
    }
    if (ValueTypes::kHasTrellis && params.v_levels != nullptr) {
      SharedLevels::Load(params.v_type.decode, params.v_levels, nullptr, memory.value_levels, ThreadIndex(), kThreads);
    }
  }

  // Scales of a tile that its chunks share.
  struct TileScales {
    RowScales<kRowTiles> keys;
    float values;
  };
  template <class KvType>
  static KVANTA_DEVICE TileScales QuantizedScales(const AttentionParams& params, const QueryTile& tile,
                                                  const TileMemory& memory, const KvType& keys, int t) {
    TileScales scales;
    const float logit = LogitScale(params);
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int at_row = 4 * RowOf(row_tile, q, t);
      const float query = KvType::kBf16 ? 1.0F : LoadShared<float>(memory.scales + at_row);
      scales.keys.row[row_tile][q] = query * (logit * (params.k_scale[tile.kv_head] * params.k_type.unit));
      scales.keys.offset[row_tile][q] = keys.HasTokenOffset() ? LoadShared<float>(memory.sums + at_row) * logit : 0.0F;
    });
    scales.values = params.v_scale[tile.kv_head] * params.v_type.unit;
    return scales;
  }
  // Scales of exact pages, whose operands are the values.
  static KVANTA_DEVICE TileScales ExactScales(const AttentionParams& params) {
    TileScales scales{};
    ForRows<kRowTiles>([&](int row_tile, int q) { scales.keys.row[row_tile][q] = LogitScale(params); });
    scales.values = 1;
    return scales;
  }
  static KVANTA_DEVICE float LogitScale(const AttentionParams& params) {
    return params.softmax_scale * (params.softcap > 0 ? 1.0F : kLog2E);
  }

  // Visits the type of a chunk's cells: of a plain chunk, the stored one.
  template <bool kPlain, class KvTypes, class F>
  static KVANTA_DEVICE void VisitType(DecodeKind decode, const KvTypeDesc& desc, int levels, F visit) {
    if constexpr (kPlain) {
      visit(typename KvTypes::Stored(desc, levels));
    } else {
      KvTypes::Visit(decode, desc, visit, levels);
    }
  }

  // `staged_scales`: of staged types. kPlain: a staged chunk, fully visible.
  template <bool kPlain>
  static KVANTA_DEVICE void AttendChunk(const AttentionParams& params, const QueryTile& tile, const TileMemory& memory,
                                        int head_dim, int position, const ChunkLocation& location,
                                        const TileScales& staged_scales, Stream& stream, const SharedPageTable& pages,
                                        int lane, RowState<kRowTiles>& state, Outputs& outputs) {
    const int g = lane / 4;
    const int t = lane % 4;
    ChunkView<kRowTiles> chunk;
    if constexpr (!kPlain) {
      chunk = MakeChunkView<kRowTiles, false>(params, tile, position,
                                              [&](int row_tile, int q) { return RowOf(row_tile, q, t) / tile.heads; });
    }
    const CellOffsets& k = location.exact ? params.exact_k : params.k;
    const CellOffsets& v = location.exact ? params.exact_v : params.v;
    // In a bf16 layer, exact cells are read like all others.
    const bool exact = !kPlain && Kernel::kHasExact && location.exact;

    RowFragments<kRowTiles> s;
    TileScales scales = staged_scales;
    stream.Wait();
    const auto score = [&](auto type) {
      using KvType = decltype(type);
      using Keys = KeyScores<KvType, kRowTiles, Outputs::kMaxBlocks, kUnrolled>;
      if (exact) {
        scales = ExactScales(params);
      } else if (!Kernel::kStaged) {
        scales = QuantizedScales(params, tile, memory, type, t);
      }
      if (type.HasChannelBits()) LoadTokenGroup(params, tile, memory, head_dim, location, lane);
      const auto attend = [&](const auto& cell) {
        if constexpr (!Stream::kQueriesOnM) {
          Keys::Scores(type, cell, head_dim, exact ? memory.exact_queries : memory.queries, lane, s);
        } else if (std::is_same_v<KvType, typename KeyTypes::Stored>) {
          Keys::Scores(type, cell, head_dim, QueriesOnM{memory.queries}, lane, s);
        } else {
          Keys::Scores(type, cell, head_dim, memory.exact_queries, lane, s);
        }
        Keys::Scale(type, cell, scales.keys, g, s);
      };
      if constexpr (FromStream<kPlain, KvType, KeyTypes>()) {
        attend(stream.Keys());
      } else {
        attend(PageCell(location.record + k.Cell(tile.kv_head), k, CodeBytes(type, head_dim), params.page_size,
                        location.token));
      }
    };
    VisitType<kPlain, KeyTypes>(exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, memory.key_levels,
                                score);
    stream.NextKeys(params, position, lane);
    if (Kernel::kHasUnquantized && params.unquantized_dim != 0) {
      using KvType = StaticKvType<formats::Bf16>;
      AddUnquantized<KvType, kRowTiles, BlocksOf(kMaxOutliers)>(
          params, KvType(params.k_type), tile, params.unquantized_dim, location, memory.unquantized_queries,
          [&](int /*row_tile*/, int /*q*/) { return LogitScale(params); }, lane, s);
    }
    RowValues<kRowTiles> bias = {};
    if (params.softcap > 0 || params.sinks != nullptr) {
      ForRows<kRowTiles>([&](int row_tile, int q) {
        bias[row_tile][q] = LoadShared<float>(memory.bias + 4 * RowOf(row_tile, q, t)) * params.softmax_scale;
      });
    }
    ToLogits<kRowTiles>(params, bias, s);
    if constexpr (!kPlain) MaskLogits<kRowTiles>(chunk, g, s);
    RowValues<kRowTiles> row_max;
    RowMax<kRowTiles>(s, row_max);
    RowValues<kRowTiles> rescale;
    Softmax<kRowTiles>(row_max, s, state, rescale);
    stream.Wait();
    const auto add_values = [&](auto type) {
      using KvType = decltype(type);
      const auto add = [&](const auto& cell) {
        WeightedValues<KvType, Outputs, kPlain>::Add(params, type, cell, tile, chunk, position, head_dim, s, rescale,
                                                     scales.values, lane, state, outputs);
      };
      if constexpr (FromStream<kPlain, KvType, ValueTypes>()) {
        add(stream.Values());
      } else {
        add(PageCell(location.record + v.Cell(tile.kv_head), v, CodeBytes(type, head_dim), params.page_size,
                     location.token));
      }
    };
    VisitType<kPlain, ValueTypes>(exact ? DecodeKind::kBf16 : params.v_type.decode, params.v_type, memory.value_levels,
                                  add_values);
    stream.NextValues(params, pages, position, lane);
  }

  // Loads the bits and scales of the channels of a chunk's token group, by a warp.
  static KVANTA_DEVICE void LoadTokenGroup(const AttentionParams& params, const QueryTile& tile,
                                           const TileMemory& memory, int head_dim, const ChunkLocation& location,
                                           int lane) {
    const formats::Scaling& scaling = params.k_type.scaling;
    const uint8_t* const sections = location.record + params.k.Cell(tile.kv_head) + params.k.channel_scales;
    const int64_t group = location.token / scaling.token_group;
    SyncWarp();  // the group before has been read
    SharedLevels::LoadGroup(sections + group * formats::GroupScaleBytes(scaling, head_dim), params.k_levels, head_dim,
                            params.k_type.low_bits, memory.key_levels, lane);
    SyncWarp();
  }

  // True for the type whose chunks are in shared memory: the first of the list, and of decoded chunks plain ones alone.
  template <bool kPlain, class KvType, class KvTypes>
  static constexpr KVANTA_DEVICE bool FromStream() {
    return (Stream::kIsDecoded ? kPlain : Kernel::kStaged) && std::is_same_v<KvType, typename KvTypes::Stored>;
  }
};

}  // namespace kvanta::kernels::cuda
