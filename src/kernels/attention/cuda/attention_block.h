// Attention of tiles of query rows to KV splits, reading pages as they are stored; the same code for decode and
// prefill. Include the primitives first.
//
// A block computes one tile's attention to one KV split of 1,024 tokens at absolute positions; each of its four warps
// takes a quarter, in chunks of 32 tokens (16 in pages of 16): S = Q K^T on tensor cores, online softmax in f32, O += P
// V on tensor cores in f32. Query rows are on M, tokens and then channels on N, so that Q K^T's result is P V's operand
// in the same lane. Quarters are combined in ascending order, splits by a second kernel. A row's operations depend on
// its position alone, not on its tile or the batch.
#pragma once

#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

template <class Kernel>
struct AttentionBlock {
  using Layout = AttentionLayout<Kernel>;
  using KeyTypes = typename Kernel::KeyTypes;
  using ValueTypes = typename Kernel::ValueTypes;
  using Outputs = typename Kernel::Outputs;
  static constexpr bool kUnrolled = Outputs::kUnrolled;

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::UnquantizedQueries(params, Kernel::HeadDim(params.head_dim)) +
           (Kernel::kHasUnquantized ? QueryBytes(2, params.unquantized_dim) : 0);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& params) {
    const int head_dim = Kernel::HeadDim(params.head_dim);
    for (int index = BlockIndex(); index < params.metadata->task_count; index += Blocks()) {
      const SplitTask task = params.metadata->tasks[index];
      const QueryTile tile = params.metadata->tiles[task.tile];
      const int unquantized_rows = Layout::kResults + Layout::ResultBytes(head_dim);
      QueryRows::Load<Kernel::kHasUnquantized>(params, tile, head_dim, Layout::kResults, Layout::kScales, Layout::kBias,
                                               Layout::kSums, unquantized_rows);
      SyncBlock();
      KeyTypes::Visit(params.k_type.decode, params.k_type, [&](auto type) {
        QueryRows::Pack<decltype(type)>(head_dim, Layout::kResults, Layout::kScales, Layout::Queries(head_dim));
      });
      if (Kernel::kHasExact && params.exact.base != nullptr) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(head_dim, Layout::kResults, Layout::kScales,
                                                     Layout::ExactQueries(params, head_dim));
      }
      if (Kernel::kHasUnquantized && params.unquantized_dim != 0) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(params.unquantized_dim, unquantized_rows, Layout::kScales,
                                                     Layout::UnquantizedQueries(params, head_dim));
      }
      SyncBlock();
      for (int split = task.first_split; split < task.last_split; ++split) {
        AttendQuarter(params, tile, head_dim, split);
        SyncBlock();
        CombineQuarters(params, tile, head_dim, task.result_row, split == task.first_split);
        SyncBlock();
      }
    }
  }

 private:
  static KVANTA_DEVICE void AttendQuarter(const AttentionParams& params, const QueryTile& tile, int head_dim,
                                          int split) {
    const int lane = ThreadIndex() % kWarp;
    const int quarter = ThreadIndex() / kWarp;
    const int warp_bytes = Layout::kResults + quarter * Layout::WarpBytes(head_dim);
    Outputs outputs;
    if constexpr (!kUnrolled) outputs.base = warp_bytes + 16 * lane;
    const float zeros[4][4] = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block < head_dim) outputs.Store(block, zeros);
    }
    RowState state;
    int tokens[2];
    InitRowState(tile, params.v_type.decode, lane, state, tokens);
    const int step = Kernel::kStaged ? kChunkTokens : ChunkTokens(params);
    const int quarter_begin = split * kSplitTokens + quarter * kQuarterTokens;
    const int last = tile.first_position + tile.tokens - 1;
    const int end = last + 1 < quarter_begin + kQuarterTokens ? last + 1 : quarter_begin + kQuarterTokens;
    const int begin = FirstVisibleStep(params, tile, quarter_begin, step);
    const SharedPageTable pages{Layout::kPages + quarter * (Layout::kQuarterPages * 8),
                                quarter_begin >> params.page_shift};
    pages.Load(params, tile, end, lane, Layout::kQuarterPages);
    SyncWarp();
    const auto look_up = [&](int position) { return pages.LookUpPage(params, tile, position); };
    Stage stage;
    if constexpr (Kernel::kStaged) {
      const auto fetch = [&](int position, auto& cell, const CellOffsets& offsets, const CellOffsets& exact_offsets) {
        if (position < end) {
          const ChunkLocation location = look_up(position);
          const bool is_exact = location.exact && Kernel::kHasExact;  // exact pages are few and not staged
          const CellOffsets& in_record = location.exact ? exact_offsets : offsets;
          if (!is_exact) {
            cell.Fetch(location.record + in_record.Cell(tile.kv_head), in_record, params.page_size, location.token,
                       lane);
          }
        }
        CommitCopies();
      };
      const auto fetch_keys = [&](int position) { fetch(position, stage.keys, params.k, params.exact_k); };
      const auto fetch_values = [&](int position) { fetch(position, stage.values, params.v, params.exact_v); };
      for (int i = 0; i < Kernel::kStages; ++i) {
        stage.Select(warp_bytes, i);
        fetch_keys(begin + i * kChunkTokens);
        fetch_values(begin + i * kChunkTokens);
      }
      int current = 0;
      for (int position = begin; position < end; position += kChunkTokens) {
        stage.Select(warp_bytes, current);
        const auto arrived = [] {
          WaitForCopies<2 * Kernel::kStages - 1>();
          SyncWarp();
        };
        AttendChunk(
            params, tile, head_dim, position, look_up(position), tokens, stage, arrived,
            [&] {
              SyncWarp();
              fetch_keys(position + Kernel::kStages * kChunkTokens);
            },
            lane, state, outputs);
        SyncWarp();
        fetch_values(position + Kernel::kStages * kChunkTokens);
        current = current + 1 == Kernel::kStages ? 0 : current + 1;
      }
      WaitForCopies<0>();
      SyncWarp();
    } else {
      for (int position = begin; position < end; position += step) {
        AttendChunk(
            params, tile, head_dim, position, look_up(position), tokens, stage, [] {}, [] {}, lane, state, outputs);
      }
    }
    StoreQuarter(head_dim, warp_bytes + 16 * lane, quarter, lane, state, outputs);
  }

  template <class K, bool kStaged = K::kStaged>
  struct StagedChunk {
    typename K::StagedKeys keys;
    typename K::StagedValues values;

    KVANTA_DEVICE void Select(int warp_bytes, int stage) {
      keys.base = warp_bytes + stage * K::kChunkBytes;
      values.base = keys.base + K::StagedKeys::kBytes;
    }
  };
  template <class K>
  struct StagedChunk<K, false> {
    int keys, values;  // unused
  };
  using Stage = StagedChunk<Kernel>;

  // `arrived` waits for the staged cells; `keys_read` is called when the staged keys may be overwritten.
  template <class Arrived, class KeysRead>
  static KVANTA_DEVICE void AttendChunk(const AttentionParams& params, const QueryTile& tile, int head_dim,
                                        int position, const ChunkLocation& location, const int (&tokens)[2],
                                        const Stage& stage, Arrived arrived, KeysRead keys_read, int lane,
                                        RowState& state, Outputs& outputs) {
    const ChunkView chunk = MakeChunkView(params, tile, position, tokens);
    const CellOffsets& k = location.exact ? params.exact_k : params.k;
    const CellOffsets& v = location.exact ? params.exact_v : params.v;
    // In a bf16 layer, exact cells are read like all others.
    const bool exact = Kernel::kHasExact && location.exact;

    const float scale = params.softmax_scale * (params.softcap > 0 ? 1.0F : kLog2E);
    float s[4][4];
    arrived();
    KeyTypes::Visit(exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, [&](auto type) {
      using KvType = decltype(type);
      using Keys = KeyScores<KvType, Outputs::kMaxBlocks, kUnrolled>;
      const int queries = exact ? Layout::ExactQueries(params, head_dim) : Layout::Queries(head_dim);
      RowScales scales;
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        const int at_row = 4 * (lane / 4 + 8 * row);
        const float query = KvType::kBf16 ? 1.0F : LoadShared<float>(Layout::kScales + at_row);
        scales.row[row] = exact ? scale : query * (scale * (params.k_scale[tile.kv_head] * params.k_type.unit));
        scales.offset[row] = type.HasTokenOffset() ? LoadShared<float>(Layout::kSums + at_row) * scale : 0.0F;
      }
      const auto attend = [&](const auto& cell) {
        Keys::Scores(type, cell, head_dim, queries, lane, s);
        Keys::Scale(type, cell, scales, lane % 4, s);
      };
      if constexpr (IsStaged<KvType, KeyTypes>()) {
        attend(stage.keys);
      } else {
        attend(PageCell(location.record + k.Cell(tile.kv_head), k, CodeBytes(type, head_dim), params.page_size,
                        location.token));
      }
    });
    keys_read();
    if (Kernel::kHasUnquantized && params.unquantized_dim != 0) {
      using KvType = StaticKvType<formats::Bf16>;
      const float scales[2] = {scale, scale};
      AddUnquantized<KvType, BlocksOf(kMaxOutliers)>(params, KvType(params.k_type), tile, location,
                                                     Layout::UnquantizedQueries(params, head_dim), scales, lane, s);
    }
    float bias[2] = {};
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      if (params.softcap > 0 || params.sinks != nullptr)
        bias[row] = LoadShared<float>(Layout::kBias + 4 * (lane / 4 + 8 * row)) * params.softmax_scale;
    }
    ToLogits(params, chunk, bias, lane % 4, s);
    float row_max[2];
    RowMax(s, row_max);
    float rescale[2];
    Softmax(row_max, s, state, rescale);
    arrived();
    ValueTypes::Visit(exact ? DecodeKind::kBf16 : params.v_type.decode, params.v_type, [&](auto type) {
      using KvType = decltype(type);
      const float value_scale = exact ? 1.0F : params.v_scale[tile.kv_head] * params.v_type.unit;
      const auto add = [&](const auto& cell) {
        WeightedValues<KvType, Outputs>::Add(params, type, cell, tile, chunk, position, head_dim, s, rescale,
                                             value_scale, lane, state, outputs);
      };
      if constexpr (IsStaged<KvType, ValueTypes>()) {
        add(stage.values);
      } else {
        add(PageCell(location.record + v.Cell(tile.kv_head), v, CodeBytes(type, head_dim), params.page_size,
                     location.token));
      }
    });
  }

  // True for the type whose chunks are staged: the first of the list.
  template <class KvType, class KvTypes>
  static constexpr KVANTA_DEVICE bool IsStaged() {
    return Kernel::kStaged && std::is_same_v<KvType, typename KvTypes::Stored>;
  }

  // Results are stored in lane order: 16 bytes per tile and lane.
  static KVANTA_DEVICE void StoreQuarter(int head_dim, int lane_results, int quarter, int lane, RowState& state,
                                         const Outputs& outputs) {
    float units[2];
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      state.sum[row] += ShuffleXor(state.sum[row], 1);
      state.sum[row] += ShuffleXor(state.sum[row], 2);
      const int at = quarter * kQueryRows + lane / 4 + 8 * row;
      if (lane % 4 == 0) StoreShared(Layout::kStates + at * 8, Vec2{{Bits(state.max[row]), Bits(state.sum[row])}});
      units[row] = PowerOfTwo(state.exponent[row] - kTopExponent);
    }
    SharedOutputs results{lane_results};
    KVANTA_UNROLL_BY(kUnrolled ? Outputs::kMaxBlocks : 1)
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block >= head_dim) break;
      float out[4][4];
      outputs.Load(block, out);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) out[i / 4][i % 4] *= units[i % 4 / 2];
      results.Store(block, out);
    }
  }

  // Combines the split's quarters with the task's result so far. Each element belongs to one thread; the shared row
  // state is written after all threads have read it.
  static KVANTA_DEVICE void CombineQuarters(const AttentionParams& params, const QueryTile& tile, int head_dim,
                                            int result_row, bool first) {
    const int rows = tile.tokens * tile.heads;
    float* const split_out = params.metadata->split_out;
    float* const states = params.metadata->split_state + int64_t{result_row} * 2;
    for (int i = ThreadIndex(); i < Layout::ResultBytes(head_dim) / 4; i += kAttendWarps * kWarp) {
      const int lane = i / 4 % kWarp;
      const int out_tile = i / (4 * kWarp);
      const int row = lane / 4 + i % 4 / 2 * 8;
      const int channel = out_tile / 4 * 32 + lane % 4 * 8 + i % 2 * 4 + out_tile % 4;
      if (row >= rows || channel >= head_dim) continue;
      float max = kMinusInfinity;
      float sum = 0;
      float out = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Vec2>(Layout::kStates + (quarter * kQueryRows + row) * 8);
        const auto x = LoadShared<float>(Layout::kResults + quarter * Layout::WarpBytes(head_dim) + 4 * i);
        CombineInto(max, sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]), &out, &x, 1);
      }
      float* const total = split_out + (int64_t{result_row} + row) * head_dim + channel;
      if (!first) {
        float total_max = states[2 * row];
        float total_sum = states[2 * row + 1];
        float value = *total;
        CombineInto(total_max, total_sum, max, sum, &value, &out, 1);
        out = value;
      }
      *total = out;
    }
    SyncBlock();
    for (int row = ThreadIndex(); row < rows; row += kAttendWarps * kWarp) {
      float max = first ? kMinusInfinity : states[2 * row];
      float sum = first ? 0.0F : states[2 * row + 1];
      float split_max = kMinusInfinity;
      float split_sum = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Vec2>(Layout::kStates + (quarter * kQueryRows + row) * 8);
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
