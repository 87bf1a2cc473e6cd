// Attention of tiles of query rows to runs of cached pages, in pages as they are stored, and the merge of a tile's
// runs. Decode and prefill are the same code. A unit that includes this has included the primitives.
//
// A block attends one tile to one run of 1,024 tokens at absolute positions, each of its four warps to a quarter, chunk
// by chunk of 32 tokens (of 16 where a page has no more): S = Q K^T by tensor cores, an online softmax in f32, O += P V
// by tensor cores in f32. Query rows lie on M, tokens and then channels on N: what Q K^T leaves in a lane is what P V
// wants there. Quarters are merged in ascending order, runs by another launch. A row's operations depend on its
// position alone: not on the tile it came with, not on the batch.
#pragma once

#include "kernels/attention/cuda/attention_kernels.h"
#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

template <class Kernel>
struct AttendBlock {
  using At = AttendShared<Kernel>;
  using KeyKvTypes = typename Kernel::KeyKvTypes;
  using ValueKvTypes = typename Kernel::ValueKvTypes;
  using Outputs = typename Kernel::Outputs;
  static constexpr bool kUnrolled = Outputs::kUnrolled;

  static constexpr int SharedBytes(const AttentionParams& layer) {
    return At::UnquantizedQueries(layer, Kernel::HeadDim(layer.head_dim)) +
           (Kernel::kHasUnquantized ? QueryBytes(2, layer.unquantized_dim) : 0);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& layer) {
    const int head_dim = Kernel::HeadDim(layer.head_dim);
    for (int task = BlockIndex(); task < layer.step->task_count; task += Blocks()) {
      const SplitTask runs = layer.step->tasks[task];
      const QueryTile tile = layer.step->tiles[runs.tile];
      const int unquantized_rows = At::kResults + At::ResultBytes(head_dim);
      QueryRows::Load<Kernel::kHasUnquantized>(layer, tile, head_dim, At::kResults, At::kScales, At::kBias, At::kSums,
                                               unquantized_rows);
      SyncBlock();
      KeyKvTypes::Of(layer.k_type.kind, layer.k_type, [&](auto side) {
        QueryRows::Pack<decltype(side)>(head_dim, At::kResults, At::kScales, At::Queries(head_dim));
      });
      if (Kernel::kHasExact && layer.exact.base != nullptr) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(head_dim, At::kResults, At::kScales,
                                                     At::ExactQueries(layer, head_dim));
      }
      if (Kernel::kHasUnquantized && layer.unquantized_dim != 0) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(layer.unquantized_dim, unquantized_rows, At::kScales,
                                                     At::UnquantizedQueries(layer, head_dim));
      }
      SyncBlock();
      for (int run = runs.first_split; run < runs.last_split; ++run) {
        AttendQuarter(layer, tile, head_dim, run);
        SyncBlock();
        CombineQuarters(layer, tile, head_dim, runs.slot, run == runs.first_split);
        SyncBlock();
      }
    }
  }

 private:
  static KVANTA_DEVICE void AttendQuarter(const AttentionParams& layer, const QueryTile& tile, int head_dim, int run) {
    const int lane = ThreadIndex() % kWarp;
    const int quarter = ThreadIndex() / kWarp;
    const int warp_bytes = At::kResults + quarter * At::WarpBytes(head_dim);
    Outputs outputs;
    if constexpr (!kUnrolled) outputs.base = warp_bytes + 16 * lane;
    const float zeros[4][4] = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block < head_dim) outputs.Put(block, zeros);
    }
    TileRows rows;
    int tokens[2];
    BeginRows(tile, layer.v_type.kind, lane, rows, tokens);
    // Chunks with a token that some row sees.
    const int step = Kernel::kStaged || layer.page_size > kChunkTokens ? kChunkTokens : layer.page_size;
    const int quarter_begin = run * kSplitTokens + quarter * kQuarterTokens;
    const int last = tile.first + tile.tokens - 1;
    const int end = last + 1 < quarter_begin + kQuarterTokens ? last + 1 : quarter_begin + kQuarterTokens;
    const int unseen = layer.sliding_window > 0 ? tile.first - layer.sliding_window + 1 - quarter_begin : 0;
    const int begin = quarter_begin + (unseen > 0 ? unseen / step * step : 0);
    const PageWindow pages{At::kPages + quarter * (At::kQuarterPages * 8), quarter_begin >> layer.page_shift};
    pages.Load(layer, tile, end, lane, At::kQuarterPages);
    SyncWarp();
    const auto locate = [&](int position) { return pages.LookUpPage(layer, tile, position); };
    Stage stage;
    if constexpr (Kernel::kStaged) {
      const auto fetch = [&](int position, auto& cell, const CellPlace& place, const CellPlace& exact_place) {
        if (position < end) {
          const Location at = locate(position);
          const bool is_exact = at.exact && Kernel::kHasExact;  // is not staged: such pages are few
          const CellPlace& in_record = at.exact ? exact_place : place;
          if (!is_exact) {
            cell.Fetch(at.record + in_record.first + tile.kv_head * in_record.stride, in_record, layer.page_size,
                       at.slot, lane);
          }
        }
        CommitCopies();
      };
      const auto fetch_keys = [&](int position) { fetch(position, stage.keys, layer.k, layer.exact_k); };
      const auto fetch_values = [&](int position) { fetch(position, stage.values, layer.v, layer.exact_v); };
      for (int ahead = 0; ahead < Kernel::kDepth; ++ahead) {
        stage.At(warp_bytes, ahead);
        fetch_keys(begin + ahead * kChunkTokens);
        fetch_values(begin + ahead * kChunkTokens);
      }
      int which = 0;
      for (int position = begin; position < end; position += kChunkTokens) {
        stage.At(warp_bytes, which);
        const auto arrived = [] {
          WaitForCopies<2 * Kernel::kDepth - 1>();
          SyncWarp();
        };
        AttendChunk(
            layer, tile, head_dim, position, locate(position), tokens, stage, arrived,
            [&] {
              SyncWarp();
              fetch_keys(position + Kernel::kDepth * kChunkTokens);
            },
            lane, rows, outputs);
        SyncWarp();
        fetch_values(position + Kernel::kDepth * kChunkTokens);
        which = which + 1 == Kernel::kDepth ? 0 : which + 1;
      }
      WaitForCopies<0>();
      SyncWarp();
    } else {
      for (int position = begin; position < end; position += step) {
        AttendChunk(
            layer, tile, head_dim, position, locate(position), tokens, stage, [] {}, [] {}, lane, rows, outputs);
      }
    }
    StoreQuarter(head_dim, warp_bytes + 16 * lane, quarter, lane, rows, outputs);
  }

  template <class K, bool kStaged = K::kStaged>
  struct StageOf {
    typename K::StagedKeys keys;
    typename K::StagedValues values;

    KVANTA_DEVICE void At(int warp_bytes, int which) {
      keys.base = warp_bytes + which * K::kChunkBytes;
      values.base = keys.base + K::StagedKeys::kBytes;
    }
  };
  template <class K>
  struct StageOf<K, false> {
    int keys, values;  // nothing is
  };
  using Stage = StageOf<Kernel>;

  // `arrived`: waits for what is staged; `keys_read`: they are not needed any more.
  template <class Arrived, class KeysRead>
  static KVANTA_DEVICE void AttendChunk(const AttentionParams& layer, const QueryTile& tile, int head_dim, int position,
                                        const Location& at, const int (&tokens)[2], const Stage& stage, Arrived arrived,
                                        KeysRead keys_read, int lane, TileRows& rows, Outputs& outputs) {
    const ChunkView chunk = ViewOf(layer, tile, position, tokens);
    const CellPlace& k = at.exact ? layer.exact_k : layer.k;
    const CellPlace& v = at.exact ? layer.exact_v : layer.v;
    // A layer that is bf16 anyway reads its exact cells as its others.
    const bool exact = Kernel::kHasExact && at.exact;

    const float scale = layer.softmax_scale * (layer.softcap > 0 ? 1.0F : kLog2E);
    float s[4][4];
    arrived();
    KeyKvTypes::Of(exact ? DecodeKind::kBf16 : layer.k_type.kind, layer.k_type, [&](auto side) {
      using Side = decltype(side);
      using Keys = KeyScores<Side, Outputs::kMaxBlocks, kUnrolled>;
      const int queries = exact ? At::ExactQueries(layer, head_dim) : At::Queries(head_dim);
      RowScales scales;
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        const int at_row = 4 * (lane / 4 + 8 * row);
        const float query = Side::kBf16 ? 1.0F : LoadShared<float>(At::kScales + at_row);
        scales.row[row] = exact ? scale : query * (scale * (layer.k_scale[tile.kv_head] * layer.k_type.unit));
        scales.zero[row] = side.TokenOffset() ? LoadShared<float>(At::kSums + at_row) * scale : 0.0F;
      }
      const auto attend = [&](const auto& cell) {
        Keys::Scores(side, cell, head_dim, queries, lane, s);
        Keys::Scale(side, cell, scales, lane % 4, s);
      };
      if constexpr (IsStaged<Side, KeyKvTypes>()) {
        attend(stage.keys);
      } else {
        attend(PageCell(at.record + k.first + tile.kv_head * k.stride, k, CodeBytes(side, head_dim), layer.page_size,
                        at.slot));
      }
    });
    keys_read();
    if (Kernel::kHasUnquantized && layer.unquantized_dim != 0) {
      using Side = StaticKvType<formats::Bf16>;
      const float scales[2] = {scale, scale};
      AddUnquantized<Side, BlocksOf(kMaxOutliers)>(layer, Side(layer.k_type), tile, at,
                                                   At::UnquantizedQueries(layer, head_dim), scales, lane, s);
    }
    float bias[2] = {};
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      if (layer.softcap > 0) bias[row] = LoadShared<float>(At::kBias + 4 * (lane / 4 + 8 * row)) * layer.softmax_scale;
    }
    Logits(layer, chunk, bias, lane % 4, s);
    float argmaxes[2];
    Argmaxes(s, argmaxes);
    float decay[2];
    Softmax(argmaxes, s, rows, decay);
    arrived();
    ValueKvTypes::Of(exact ? DecodeKind::kBf16 : layer.v_type.kind, layer.v_type, [&](auto side) {
      using Side = decltype(side);
      const float value_scale = exact ? 1.0F : layer.v_scale[tile.kv_head] * layer.v_type.unit;
      const auto add = [&](const auto& cell) {
        WeightedValues<Side, Outputs>::Add(layer, side, cell, tile, chunk, position, head_dim, s, decay, value_scale,
                                           lane, rows, outputs);
      };
      if constexpr (IsStaged<Side, ValueKvTypes>()) {
        add(stage.values);
      } else {
        add(PageCell(at.record + v.first + tile.kv_head * v.stride, v, CodeBytes(side, head_dim), layer.page_size,
                     at.slot));
      }
    });
  }

  // Whether a side's chunks are: those of the first in the list.
  template <class Side, class Sides>
  static constexpr KVANTA_DEVICE bool IsStaged() {
    return Kernel::kStaged && std::is_same_v<Side, typename Sides::Stored>;
  }

  // Results lie in the order of lanes: 16 bytes a tile and lane.
  static KVANTA_DEVICE void StoreQuarter(int head_dim, int lane_results, int quarter, int lane, TileRows& rows,
                                         const Outputs& outputs) {
    float units[2];
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      rows.sum[row] += ShuffleXor(rows.sum[row], 1);
      rows.sum[row] += ShuffleXor(rows.sum[row], 2);
      const int at = quarter * kQueryRows + lane / 4 + 8 * row;
      if (lane % 4 == 0) StoreShared(At::kStates + at * 8, Vec2{{Bits(rows.max_value[row]), Bits(rows.sum[row])}});
      units[row] = PowerOfTwo(rows.exponent[row] - kTopExponent);
    }
    SharedOutputs results{lane_results};
    KVANTA_UNROLL_BY(kUnrolled ? Outputs::kMaxBlocks : 1)
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
      if (32 * block >= head_dim) break;
      float out[4][4];
      outputs.Take(block, out);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) out[i / 4][i % 4] *= units[i % 4 / 2];
      results.Put(block, out);
    }
  }

  // The run's result, into the task's so far. Elements stay with their thread; what they share is written after all
  // have read it.
  static KVANTA_DEVICE void CombineQuarters(const AttentionParams& layer, const QueryTile& tile, int head_dim, int slot,
                                            bool first) {
    const int rows = tile.tokens * tile.heads;
    float* const split_out = layer.step->split_out;
    float* const states = layer.step->split_state + int64_t{slot} * 2;
    for (int i = ThreadIndex(); i < At::ResultBytes(head_dim) / 4; i += kAttendWarps * kWarp) {
      const int lane = i / 4 % kWarp;
      const int tile_of_head = i / (4 * kWarp);
      const int row = lane / 4 + i % 4 / 2 * 8;
      const int channel = tile_of_head / 4 * 32 + lane % 4 * 8 + i % 2 * 4 + tile_of_head % 4;
      if (row >= rows || channel >= head_dim) continue;
      float max_value = kMinusInfinity;
      float sum = 0;
      float out = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Vec2>(At::kStates + (quarter * kQueryRows + row) * 8);
        const auto x = LoadShared<float>(At::kResults + quarter * At::WarpBytes(head_dim) + 4 * i);
        CombineInto(max_value, sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]), &out, &x,
                    1);
      }
      float* const total = split_out + (int64_t{slot} + row) * head_dim + channel;
      if (!first) {
        float total_max = states[2 * row];
        float total_sum = states[2 * row + 1];
        float value = *total;
        CombineInto(total_max, total_sum, max_value, sum, &value, &out, 1);
        out = value;
      }
      *total = out;
    }
    SyncBlock();
    for (int row = ThreadIndex(); row < rows; row += kAttendWarps * kWarp) {
      float max_value = first ? kMinusInfinity : states[2 * row];
      float sum = first ? 0.0F : states[2 * row + 1];
      float split_max = kMinusInfinity;
      float split_sum = 0;
      for (int quarter = 0; quarter < kAttendWarps; ++quarter) {
        const auto state = LoadShared<Vec2>(At::kStates + (quarter * kQueryRows + row) * 8);
        CombineInto(split_max, split_sum, std::bit_cast<float>(state.word[0]), std::bit_cast<float>(state.word[1]),
                    nullptr, nullptr, 0);
      }
      CombineInto(max_value, sum, split_max, split_sum, nullptr, nullptr, 0);
      states[2 * row] = max_value;
      states[2 * row + 1] = sum;
    }
  }

  static KVANTA_DEVICE uint32_t Bits(float x) { return std::bit_cast<uint32_t>(x); }
};

}  // namespace kvanta::kernels::cuda
