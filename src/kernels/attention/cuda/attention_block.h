// Attention of tiles of query rows to KV splits, reading pages as they are stored; the same code for decode and
// prefill. Include the primitives first.
//
// A block computes one tile's attention to one KV split of 1,024 tokens at absolute positions; each of its four warps
// takes a quarter, in chunks of 32 tokens (16 in pages of 16): S^T = K Q^T on tensor cores, online softmax in f32,
// O^T += V^T P^T on tensor cores in f32. Tokens and then channels are on M, query rows on N, 8 in a product: a group of
// up to 8 query heads takes one. Quarters are combined in ascending order, splits by the block that computes the last
// of a tile. A row's operations depend on its position alone, not on its tile or the batch.
#pragma once

#include "kernels/attention/cuda/chunk_attention.h"
#include "kernels/attention/cuda/combine_block.h"

namespace kvanta::kernels::cuda {

template <class Kernel>
struct AttentionBlock {
  using Layout = AttentionLayout<Kernel>;
  using KeyTypes = typename Kernel::KeyTypes;
  using Outputs = typename Kernel::Outputs;
  using Stream = ChunkStream<Kernel>;
  static constexpr bool kUnrolled = Outputs::kUnrolled;
  static constexpr int kRowTiles = Outputs::kRowTiles;
  static constexpr int kThreads = kAttendWarps * kWarp;

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::Bytes(params, Kernel::HeadDim(params.head_dim));
  }

  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    ForTasks(*params.metadata, [&](const SplitTask& task) { Attend(params, task); });
    if (params.CombinesTiles()) CombineFinishedTiles(params);
  }

 private:
  using Chunks = ChunkAttention<Kernel>;

  static KVANTA_DEVICE void Attend(const AttentionParams& params, const SplitTask& task) {
    const int head_dim = Kernel::HeadDim(params.head_dim);
    const QueryTile tile = params.metadata->tiles[task.tile];
    const TileMemory memory = Layout::Memory(params, head_dim);
    Chunks::LoadQueries(params, tile, memory, head_dim);
    Chunks::LoadLevels(params, tile.kv_head, memory);
    SyncBlock();
    Chunks::PackQueries(params, memory, head_dim);
    SyncBlock();
    for (int split = task.first_split; split < task.last_split; ++split) {
      AttendQuarter(params, tile, memory, head_dim, split);
      SyncBlock();
      const int index_in_task = split - task.first_split;
      CombineQuarters(params, tile, head_dim, task.result_row + index_in_task * task.result_rows,
                      index_in_task == 0 || task.result_rows != 0);
      SyncBlock();
    }
  }

  static KVANTA_DEVICE void AttendQuarter(const AttentionParams& params, const QueryTile& tile,
                                          const TileMemory& memory, int head_dim, int split) {
    const int lane = ThreadIndex() & (kWarp - 1);
    const int quarter = ThreadIndex() / kWarp;
    const int warp_bytes = Layout::kResults + quarter * Layout::WarpBytes(head_dim);
    Outputs outputs;
    if constexpr (!kUnrolled) outputs.base = warp_bytes + 16 * lane;
    const RowFragments<kRowTiles> zeros = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block < head_dim) outputs.Store(block, zeros);
    }
    RowState<kRowTiles> state;
    InitRowState<kRowTiles>(params.v_type.decode, state);
    const int step = Kernel::kStaged ? kChunkTokens : ChunkTokens(params);
    const int quarter_begin = split * kSplitTokens + quarter * kQuarterTokens;
    const int end = VisibleEnd(params, tile, quarter_begin + kQuarterTokens);
    const int begin = FirstVisibleStep(params, tile, quarter_begin, step);
    const SharedPageTable pages(params, tile, Layout::kPages + quarter * (Layout::kQuarterPages * 8),
                                quarter_begin >> params.page_shift);
    pages.Load(params, tile, end, lane, Layout::kQuarterPages);
    SyncWarp();
    Stream stream(params, tile, warp_bytes, lane);
    if constexpr (Kernel::kStaged) {
      // Chunks [plain_begin, plain_end) are staged and fully visible.
      const FullyVisible visible(params, tile);
      const int staged_begin = pages.quantized.first << params.page_shift;
      const int staged_end = pages.quantized.end << params.page_shift;
      const int plain_begin = staged_begin > visible.first ? staged_begin : visible.first;
      const int plain_end = staged_end < visible.last + 1 ? staged_end : visible.last + 1;
      stream.Start(params, pages, begin, staged_begin, staged_end < end ? staged_end : end, lane);
      const auto scales =
          Chunks::QuantizedScales(params, tile, memory, typename KeyTypes::Stored(params.k_type), lane % 4);
      for (int position = begin; position < end;) {
        if (position >= plain_begin && position < plain_end) {
          const int plain_last = end < plain_end ? end : plain_end;
          for (; position < plain_last; position += kChunkTokens) {
            Chunks::template AttendChunk<true>(params, tile, memory, head_dim, position, {}, scales, stream, pages,
                                               lane, state, outputs);
          }
        } else {
          Chunks::template AttendChunk<false>(params, tile, memory, head_dim, position,
                                              pages.LookUpPage(params, position), scales, stream, pages, lane, state,
                                              outputs);
          position += kChunkTokens;
        }
      }
      WaitForCopies<0>();
      SyncWarp();
    } else {
      const FullyVisible visible(params, tile);
      for (int position = begin; position < end; position += step) {
        const ChunkLocation location = pages.LookUpPage(params, position);
        if constexpr (kUnrolled) {
          if (visible.Contains(position) && !location.exact) {
            Chunks::template AttendChunk<true>(params, tile, memory, head_dim, position, location, {}, stream, pages,
                                               lane, state, outputs);
            continue;
          }
        }
        Chunks::template AttendChunk<false>(params, tile, memory, head_dim, position, location, {}, stream, pages, lane,
                                            state, outputs);
      }
    }
    StoreQuarter(head_dim, warp_bytes + 16 * lane, quarter, lane, state, outputs);
  }

  // Results are stored in lane order: 16 bytes per tile and lane.
  static KVANTA_DEVICE void StoreQuarter(int head_dim, int lane_results, int quarter, int lane,
                                         RowState<kRowTiles>& state, const Outputs& outputs) {
    RowValues<kRowTiles> units;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const float sum = RowSum(state.sum[row_tile][q]);
      const int at = quarter * Layout::kRows + RowOf(row_tile, q, lane % 4);
      if (lane < 4) StoreShared(Layout::kStates + at * 8, Vec2{{Bits(state.max[row_tile][q]), Bits(sum)}});
      units[row_tile][q] = PowerOfTwo(state.exponent[row_tile][q] - kTopExponent);
    });
    SharedOutputs<kRowTiles> results{lane_results};
    KVANTA_UNROLL_BY(kUnrolled ? Outputs::kMaxBlocks : 1)
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block >= head_dim) break;
      RowFragments<kRowTiles> out;
      outputs.Load(block, out);
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) out[i / 8][i / 4 % 2][i % 4] *= units[i / 8][i % 2];
      results.Store(block, out);
    }
  }

  // Combines the split's quarters, and with the result so far unless it is the first of its result. Each element
  // belongs to one thread; the shared row state is written after all threads have read it.
  static KVANTA_DEVICE void CombineQuarters(const AttentionParams& params, const QueryTile& tile, int head_dim,
                                            int result_row, bool first) {
    const int rows = tile.tokens * tile.heads;
    const int lane = ThreadIndex() & (kWarp - 1);
    float* const states = params.metadata->split_state + int64_t{result_row} * 2;
    for (int row = ThreadIndex() / kWarp; row < rows; row += kAttendWarps) {
      float* const totals = params.metadata->split_out + (int64_t{result_row} + row) * head_dim;
      for (int channel = 4 * lane; channel < head_dim; channel += 4 * kWarp) {
        float max = kMinusInfinity;
        float sum = 0;
        float out[4] = {};
        KVANTA_UNROLL
        for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
          const auto state = LoadShared<Vec2>(Layout::kStates + (quarter * Layout::kRows + row) * 8);
          float more[4];
          KVANTA_UNROLL
          for (int i = 0; i < 4; ++i) {
            more[i] = LoadShared<float>(Layout::kResults + quarter * Layout::WarpBytes(head_dim) +
                                        SharedOutputs<kRowTiles>::ElementAt(row, channel + i));
          }
          CombineInto(max, sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]), out, more, 4);
        }
        if (!first) {
          float total_max = states[2 * row];
          float total_sum = states[2 * row + 1];
          float total[4];
          KVANTA_UNROLL
          for (int i = 0; i < 4; ++i) total[i] = totals[channel + i];
          CombineInto(total_max, total_sum, max, sum, total, out, 4);
          KVANTA_UNROLL
          for (int i = 0; i < 4; ++i) out[i] = total[i];
        }
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) totals[channel + i] = out[i];
      }
    }
    SyncBlock();
    for (int row = ThreadIndex(); row < rows; row += kAttendWarps * kWarp) {
      float max = first ? kMinusInfinity : states[2 * row];
      float sum = first ? 0.0F : states[2 * row + 1];
      float split_max = kMinusInfinity;
      float split_sum = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Vec2>(Layout::kStates + (quarter * Layout::kRows + row) * 8);
        CombineInto(split_max, split_sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]),
                    nullptr, nullptr, 0);
      }
      CombineInto(max, sum, split_max, split_sum, nullptr, nullptr, 0);
      states[2 * row] = max;
      states[2 * row + 1] = sum;
    }
  }

  static KVANTA_DEVICE uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
};

}  // namespace kvanta::kernels::cuda
