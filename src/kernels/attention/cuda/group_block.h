// Attention of groups of query tiles: up to four tiles of a sequence's page and KV head, which share what the block
// decodes. Include the primitives first.
//
// A block computes a group's attention to a KV split of 1,024 tokens, chunk by chunk of 32 tokens: its four warps
// decode a chunk to shared memory together, as operands of the tensor cores, and then each takes one tile. Chunks that
// some row of the group does not see, and exact pages, are read by each warp for itself. A row's operations are those
// of attention_block.h, in the same order: a warp starts anew at each quarter of a split, and adds up the quarters.
#pragma once

#include "kernels/attention/cuda/chunk_attention.h"
#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/decoded_cells.h"
#include "kernels/attention/cuda/tasks.h"
#include "kernels/attention/cuda/warpgroup_tile.h"

namespace kvanta::kernels::cuda {

// kWarpgroups: with the products of a warpgroup (warpgroup_tile.h); the bits and the shared memory are the same.
template <class Kernel, bool kWarpgroups>
struct GroupBlock {
  using Keys = typename Kernel::KeyTypes::Stored;
  using Values = typename Kernel::ValueTypes::Stored;
  using Outputs = typename Kernel::Outputs;
  static constexpr int kHeadDim = Kernel::HeadDim(0);
  static constexpr int kBlocks = BlocksOf(kHeadDim);
  static constexpr int kRowTiles = Outputs::kRowTiles;
  static constexpr int kRows = kRowTiles * kRowsPerMma;
  static constexpr int kThreads = kGroupTiles * kWarp;
  static_assert(kGroupTiles == kAttendWarps && kRows == kQueryRows);

  using KeysOnN = DecodedCell<Keys, true, kHeadDim>;
  using ValuesOnN = DecodedCell<Values, false, kHeadDim>;
  // A warp's tile in a quarter.
  struct TileOnN;
  using Tile = std::conditional_t<kWarpgroups, WarpgroupTile<Kernel>, TileOnN>;

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::ValueLevels(params) + SharedLevels::Bytes(params.v_type, kHeadDim);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    ForTasks(*params.group_metadata, [&](const SplitTask& task) { Attend(params, task); });
  }

 private:
  // The block's shared memory. Results overwrite the query rows.
  struct Layout {
    static constexpr int kScales = 0;
    static constexpr int kBias = kScales + 4 * kRows * kGroupTiles;
    static constexpr int kSums = kBias + 4 * kRows * kGroupTiles;
    static constexpr int kPages = kSums + 4 * kRows * kGroupTiles;
    static constexpr int kSplitPages = kSplitTokens / kChunkTokens;  // maximum
    static constexpr int kStagedKeys = kPages + 8 * kSplitPages;
    static constexpr int kStagedValues = kStagedKeys + Kernel::StagedKeys::kBytes;
    static constexpr int kDecodedKeys = kStagedValues + Kernel::StagedValues::kBytes;
    static constexpr int kDecodedValues = kDecodedKeys + KeysOnN::kBytes;
    static constexpr int kResults = kDecodedValues + ValuesOnN::kBytes;
    static constexpr int kResultBytes = kRows * QueryRows::RowBytes(kHeadDim);
    static constexpr int kQueries = kResults + kGroupTiles * kResultBytes;
    static constexpr int kQueryBytes = QueryBytes(Kernel::KeyTypes::Stored::kTerms, kRowTiles, kHeadDim);
    static constexpr int kExactQueries = kQueries + kGroupTiles * kQueryBytes;
    static constexpr int kExactQueryBytes = QueryBytes(2, kRowTiles, kHeadDim);

    static constexpr KVANTA_DEVICE int KeyLevels(const AttentionParams& params) {
      return kExactQueries + (params.exact.base != nullptr ? kGroupTiles * kExactQueryBytes : 0);
    }
    static constexpr KVANTA_DEVICE int ValueLevels(const AttentionParams& params) {
      return KeyLevels(params) + SharedLevels::Bytes(params.k_type, kHeadDim);
    }
    // Offsets of the group's tile `index`.
    static KVANTA_DEVICE TileMemory Memory(const AttentionParams& params, int index) {
      return {.scales = kScales + index * (4 * kRows),
              .bias = kBias + index * (4 * kRows),
              .sums = kSums + index * (4 * kRows),
              .rows = kResults + index * kResultBytes,
              .unquantized_rows = 0,
              .queries = kQueries + index * kQueryBytes,
              .exact_queries = kExactQueries + index * kExactQueryBytes,
              .unquantized_queries = 0,
              .key_levels = KeyLevels(params),
              .value_levels = ValueLevels(params)};
    }
  };

  // The present chunk; copies of the next one to shared memory are in flight.
  struct Stream {
    static constexpr bool kIsDecoded = true;
    static constexpr bool kQueriesOnM = kWarpgroups;
    static KVANTA_DEVICE KeysOnN Keys() { return {Layout::kDecodedKeys}; }
    static KVANTA_DEVICE ValuesOnN Values() { return {Layout::kDecodedValues}; }
    static KVANTA_DEVICE void Wait() {}
    static KVANTA_DEVICE void NextKeys(const AttentionParams& /*params*/, int /*position*/, int /*lane*/) {}
    static KVANTA_DEVICE void NextValues(const AttentionParams& /*params*/, const SharedPageTable& /*pages*/,
                                         int /*position*/, int /*lane*/) {}
  };
  using Chunks = ChunkAttention<Kernel, Stream>;
  using TileScales = typename Chunks::TileScales;

  // A warp's tile and its group.
  struct Warp {
    QueryTile tile;
    QueryTile group;  // the tiles' query tokens
    bool active;      // has a tile
    int lane, index;
    TileMemory memory;
  };

  // Softmax states and outputs of a split's quarters so far, of the lane's rows in Tile. Outputs are in the warp's part
  // of shared memory, in lane order.
  struct SplitResult {
    RowValues<kRowTiles> max = {};
    RowValues<kRowTiles> sum = {};
    SharedOutputs<kRowTiles> outputs;
  };

  static KVANTA_DEVICE void Attend(const AttentionParams& params, const SplitTask& task) {
    const QueryTile* tiles = params.group_metadata->tiles + task.tile;
    for (int i = 0; i < task.tiles; ++i) Chunks::LoadQueries(params, tiles[i], Layout::Memory(params, i), kHeadDim);
    Warp warp;
    warp.lane = ThreadIndex() % kWarp;
    warp.index = ThreadIndex() / kWarp;
    warp.active = warp.index < task.tiles;
    warp.tile = tiles[warp.active ? warp.index : 0];
    warp.memory = Layout::Memory(params, warp.active ? warp.index : 0);
    warp.group = tiles[0];
    const QueryTile last = tiles[task.tiles - 1];
    warp.group.tokens = static_cast<int16_t>(last.first_position + last.tokens - warp.group.first_position);
    Chunks::LoadLevels(params, warp.tile.kv_head, warp.memory);
    SyncBlock();
    for (int i = 0; i < task.tiles; ++i) Chunks::PackQueries(params, Layout::Memory(params, i), kHeadDim);
    SyncBlock();
    const int of_group = warp.tile.result_row - warp.group.result_row;
    for (int split = task.first_split; split < task.last_split; ++split) {
      const int index_in_task = split - task.first_split;
      SplitResult result{.outputs = {warp.memory.rows + 16 * warp.lane}};
      AttendSplit(params, warp, split, result);
      if (warp.active) {
        AddSplit(params, warp.tile, task.result_row + of_group + index_in_task * task.result_rows,
                 index_in_task == 0 || task.result_rows != 0, warp.lane, result);
      }
      SyncBlock();
    }
  }

  static KVANTA_DEVICE void AttendSplit(const AttentionParams& params, const Warp& warp, int split,
                                        SplitResult& result) {
    const int split_begin = split * kSplitTokens;
    const int end = VisibleEnd(params, warp.group, split_begin + kSplitTokens);
    const SharedPageTable pages(params, warp.group, Layout::kPages, split_begin >> params.page_shift);
    pages.Load(params, warp.group, end, ThreadIndex(), Layout::kSplitPages);
    SyncBlock();
    const TileScales tile_scales = ScalesOf(params, warp);
    const auto scales = Tile::ScalesOf(params, warp.memory, tile_scales, warp.lane);
    // Chunks [plain_begin, plain_end) are quantized and visible to every row of the group: the block decodes them.
    const FullyVisible visible(params, warp.group);
    const int first = FirstVisibleStep(params, warp.group, split_begin, kChunkTokens);
    const int plain_begin = RoundUpToChunk(Max(visible.first, pages.quantized.first << params.page_shift, first));
    const int quantized_end = pages.quantized.end << params.page_shift;
    const int visible_end = visible.last + 1 < end ? visible.last + 1 : end;
    const int plain_end = quantized_end < visible_end ? quantized_end : visible_end;
    if (plain_begin < plain_end) {
      Fetch(params, warp, pages, plain_begin);
      Decode(params, warp, pages, plain_begin, plain_end, tile_scales.values);
    }
    ForRows<kRowTiles>([&](int row_tile, int q) {
      result.max[row_tile][q] = kMinusInfinity;
      result.sum[row_tile][q] = 0;
    });
    for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
      const int quarter_begin = split_begin + quarter * kQuarterTokens;
      const int quarter_end = end < quarter_begin + kQuarterTokens ? end : quarter_begin + kQuarterTokens;
      Tile tile(params);
      for (int position = FirstVisibleStep(params, warp.group, quarter_begin, kChunkTokens); position < quarter_end;) {
        if (position >= plain_begin && position < plain_end) {
          const int last = quarter_end < plain_end ? quarter_end : plain_end;
          for (; position < last; position += kChunkTokens) {
            if constexpr (kWarpgroups) {
              tile.Attend(params, Keys(params.k_type, warp.memory.key_levels),
                          Values(params.v_type, warp.memory.value_levels), {warp.memory.queries}, DecodedKeys(),
                          DecodedValues(), scales, warp.lane);
            } else if (warp.active) {
              tile.OnN([&](auto& state, auto& outputs) {
                Stream stream;
                Chunks::template AttendChunk<true>(params, warp.tile, warp.memory, kHeadDim, position, {}, scales,
                                                   stream, pages, warp.lane, state, outputs);
              });
            }
            const int next = position + kChunkTokens;
            if (next < plain_end) Decode(params, warp, pages, next, plain_end, scales.values);
          }
        } else {
          if (warp.active && position >= FirstVisibleStep(params, warp.tile, quarter_begin, kChunkTokens) &&
              position < VisibleEnd(params, warp.tile, end)) {
            tile.OnN([&](auto& state, auto& outputs) {
              Stream stream;
              Chunks::template AttendChunk<false>(params, warp.tile, warp.memory, kHeadDim, position,
                                                  pages.LookUpPage(params, position), ScalesOf(params, warp), stream,
                                                  pages, warp.lane, state, outputs);
            });
          }
          position += kChunkTokens;
        }
      }
      if (warp.active) AddQuarter(tile, quarter == 0, result);
    }
  }
  static KVANTA_DEVICE TileScales ScalesOf(const AttentionParams& params, const Warp& warp) {
    return Chunks::QuantizedScales(params, warp.tile, warp.memory, Keys(params.k_type), warp.lane % 4);
  }

  // Starts the copies of the chunk at `position`.
  static KVANTA_DEVICE void Fetch(const AttentionParams& params, const Warp& warp, const SharedPageTable& pages,
                                  int position) {
    const uint8_t* const record = params.quantized.Record(pages.QuantizedPage(params, position)) +
                                  static_cast<int>(warp.group.kv_head * params.k.head_stride) + 16 * warp.lane;
    const int token = position & (params.page_size - 1);
    if (warp.index == 0) StagedKeys().Fetch(record, params.k, params.page_size, token, warp.lane);
    if (warp.index == 1) StagedValues().Fetch(record, params.v, params.page_size, token, warp.lane);
    CommitCopies();
  }
  // Decodes the chunk at `position`, whose copies are in flight, after all warps have read the one before, and starts
  // the copies of the next.
  static KVANTA_DEVICE void Decode(const AttentionParams& params, const Warp& warp, const SharedPageTable& pages,
                                   int position, int end, float value_scale) {
    WaitForCopies<0>();
    SyncBlock();
    const Keys keys(params.k_type, warp.memory.key_levels);
    const Values values(params.v_type, warp.memory.value_levels);
    ForBlocks(warp.index, [&](int block) {
      KeyScores<Keys, kRowTiles, kBlocks, true>::Decode(keys, StagedKeys(), kHeadDim, block, warp.lane, DecodedKeys());
      DecodedKeys().DecodeScales(keys, StagedKeys(), block, 1, warp.lane);
    });
    // With fewer blocks than warps, those that have no keys.
    ForBlocks((warp.index + kBlocks) % kGroupTiles, [&](int block) {
      WeightedValues<Values, Outputs, true>::Decode(values, StagedValues(), kHeadDim, block, warp.lane,
                                                    DecodedValues());
      DecodedValues().DecodeScales(values, StagedValues(), block, value_scale, warp.lane);
    });
    if constexpr (kWarpgroups) FenceStoresForProducts();
    SyncBlock();
    if (position + kChunkTokens < end) Fetch(params, warp, pages, position + kChunkTokens);
  }
  // Calls f(block) for every fourth block of 32 channels from `first` on.
  template <class F>
  static KVANTA_DEVICE void ForBlocks(int first, F f) {
    static_assert(kBlocks % kGroupTiles == 0 || kBlocks < kGroupTiles);
    if constexpr (kBlocks < kGroupTiles) {
      if (first < kBlocks) f(first);
    } else {
      KVANTA_UNROLL
      for (int block = 0; block < kBlocks; block += kGroupTiles) f(first + block);
    }
  }
  static KVANTA_DEVICE typename Tile::DecodedKeys DecodedKeys() { return {Layout::kDecodedKeys}; }
  static KVANTA_DEVICE typename Tile::DecodedValues DecodedValues() { return {Layout::kDecodedValues}; }
  static KVANTA_DEVICE typename Kernel::StagedKeys StagedKeys() { return {Layout::kStagedKeys}; }
  static KVANTA_DEVICE typename Kernel::StagedValues StagedValues() { return {Layout::kStagedValues}; }

  // Adds a quarter's result to the split's.
  static KVANTA_DEVICE void AddQuarter(const Tile& tile, bool first, SplitResult& result) {
    RowState<kRowTiles> state;
    Outputs outputs;
    tile.Result(state, outputs);
    RowValues<kRowTiles> units, keep, take;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      units[row_tile][q] = PowerOfTwo(state.exponent[row_tile][q] - kTopExponent);
      const CombineFactors factors = CombineStates(result.max[row_tile][q], result.sum[row_tile][q],
                                                   state.max[row_tile][q], state.sum[row_tile][q]);
      keep[row_tile][q] = factors.keep;
      take[row_tile][q] = factors.take;
    });
    KVANTA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      RowFragments<kRowTiles> out, total = {};
      outputs.Load(block, out);
      if (!first) result.outputs.Load(block, total);
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) {
        const float more = out[i / 8][i / 4 % 2][i % 4] * units[i / 8][i % 2];
        float& x = total[i / 8][i / 4 % 2][i % 4];
        x = MultiplyAdd(x, keep[i / 8][i % 2], more * take[i / 8][i % 2]);
      }
      result.outputs.Store(block, total);
    }
  }

  // Adds a split's result to that of its task, unless it is the first.
  static KVANTA_DEVICE void AddSplit(const AttentionParams& params, const QueryTile& tile, int result_row, bool first,
                                     int lane, SplitResult& result) {
    const AttentionMetadata& metadata = *params.group_metadata;
    if constexpr (kWarpgroups) {
      TransposeValues<kRowTiles>(result.max);
      TransposeValues<kRowTiles>(result.sum);
    }
    RowValues<kRowTiles> max, sum, keep, take;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int row = RowOf(row_tile, q, lane % 4);
      const float* const states = metadata.split_state + (int64_t{result_row} + row) * 2;
      const bool adds = !first && row < tile.tokens * tile.heads;
      max[row_tile][q] = adds ? states[0] : kMinusInfinity;
      sum[row_tile][q] = adds ? states[1] : 0.0F;
      const CombineFactors factors =
          CombineStates(max[row_tile][q], sum[row_tile][q], result.max[row_tile][q], result.sum[row_tile][q]);
      keep[row_tile][q] = factors.keep;
      take[row_tile][q] = factors.take;
    });
    SyncWarp();  // other lanes have read the states
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int row = RowOf(row_tile, q, lane % 4);
      if (lane / 4 != 0 || row >= tile.tokens * tile.heads) return;
      float* const states = metadata.split_state + (int64_t{result_row} + row) * 2;
      states[0] = max[row_tile][q];
      states[1] = sum[row_tile][q];
    });
    for (int block = 0; block < kBlocks; ++block) {
      RowFragments<kRowTiles> out;
      result.outputs.Load(block, out);
      if constexpr (kWarpgroups) TransposeFragments<kRowTiles>(out);
      ForRows<kRowTiles>([&](int row_tile, int q) {
        const int row = RowOf(row_tile, q, lane % 4);
        if (row >= tile.tokens * tile.heads) return;
        float* const totals = metadata.split_out + (int64_t{result_row} + row) * kHeadDim + 32 * block + lane / 4 * 4;
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float x = out[row_tile][i / 2][i % 2 * 2 + q];
          totals[i] = first ? x : MultiplyAdd(totals[i], keep[row_tile][q], x * take[row_tile][q]);
        }
      });
    }
  }

  static constexpr KVANTA_DEVICE int RoundUpToChunk(int position) {
    return (position + kChunkTokens - 1) / kChunkTokens * kChunkTokens;
  }
  static constexpr KVANTA_DEVICE int Max(int a, int b, int c) {
    const int of_two = a > b ? a : b;
    return of_two > c ? of_two : c;
  }
};

// With query rows on N: each warp has the products of its own tile (chunk_attention.h).
template <class Kernel, bool kWarpgroups>
struct GroupBlock<Kernel, kWarpgroups>::TileOnN {
  using DecodedKeys = KeysOnN;
  using DecodedValues = ValuesOnN;
  RowState<kRowTiles> state;
  Outputs outputs;

  KVANTA_DEVICE explicit TileOnN(const AttentionParams& params) {
    InitRowState<kRowTiles>(params.v_type.decode, state);
    const RowFragments<kRowTiles> zeros = {};
    KVANTA_UNROLL
    for (int block = 0; block < kBlocks; ++block) outputs.Store(block, zeros);
  }
  static KVANTA_DEVICE const TileScales& ScalesOf(const AttentionParams& /*params*/, const TileMemory& /*memory*/,
                                                  const TileScales& scales, int /*lane*/) {
    return scales;
  }
  template <class F>
  KVANTA_DEVICE void OnN(F f) {
    f(state, outputs);
  }
  KVANTA_DEVICE void Result(RowState<kRowTiles>& result, Outputs& to) const {
    result = state;
    to = outputs;
    ForRows<kRowTiles>([&](int row_tile, int q) { result.sum[row_tile][q] = RowSum(state.sum[row_tile][q]); });
  }
};

}  // namespace kvanta::kernels::cuda
