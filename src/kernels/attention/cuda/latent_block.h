// Attention over latents (MLA): one cell is keys and values, the same for all query heads. A unit that includes this
// has included the primitives.
//
// A block attends one tile to one run of 1,024 tokens, 128 tokens at a time (64 where a page has 16): each of its four
// warps has the scores of a chunk; peaks and weights meet in shared memory; then each warp has 128 channels of the
// values of all four chunks, so that outputs of 512 channels fit into registers and are of all tokens. A row's
// operations depend on its position alone, as in attention_block.h.
#pragma once

#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/latent_values.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLatentChannels = kMaxLatentRank / kAttendWarps;  // of a warp

template <class List>
struct SidesOf;
template <class... Format>
struct SidesOf<TypeList<Format...>> {
  using Type = KvTypeDispatch<StaticKvType<Format>...>;
};

struct LatentBlock {
  using Sides = SidesOf<LatentFormats>::Type;
  // What position rotates is in the latents' format where that is not quantized.
  using UnquantizedKvTypes =
      KvTypeDispatch<StaticKvType<formats::Fp16>, StaticKvType<formats::Fp32>, StaticKvType<formats::Bf16>>;
  using Outputs = RegisterOutputs<BlocksOf(kLatentChannels)>;

  static constexpr int kResident = 2;  // blocks that a multiprocessor's registers are to hold

  static constexpr int SharedBytes(const AttentionParams& layer) {
    return At::UnquantizedQueries(layer) + QueryBytes(Terms(layer.unquantized_kind), layer.unquantized_dim);
  }

  static KVANTA_DEVICE void Run(const AttentionParams& layer) {
    const int rank = layer.head_dim;
    for (int task = BlockIndex(); task < layer.step->task_count; task += Blocks()) {
      const SplitTask runs = layer.step->tasks[task];
      const QueryTile tile = layer.step->tiles[runs.tile];
      const int unquantized_rows = At::kStage + kQueryRows * QueryRows::RowBytes(rank);
      QueryRows::Load<true>(layer, tile, rank, At::kStage, At::kScales, At::kBias, At::kSums, unquantized_rows);
      SyncBlock();
      Sides::Of(layer.k_type.kind, layer.k_type,
                [&](auto side) { QueryRows::Pack<decltype(side)>(rank, At::kStage, At::kScales, At::Queries(layer)); });
      if (At::HasExact(layer)) {
        QueryRows::Pack<StaticKvType<formats::Bf16>>(rank, At::kStage, At::kScales, At::ExactQueries(layer));
      }
      UnquantizedKvTypes::Of(layer.unquantized_kind, layer.k_type, [&](auto side) {
        QueryRows::Pack<decltype(side)>(layer.unquantized_dim, unquantized_rows, At::kScales,
                                        At::UnquantizedQueries(layer));
      });
      for (int run = runs.first_split; run < runs.last_split; ++run) {
        SyncBlock();
        AttendSplit(layer, tile, run, runs.slot, run == runs.first_split);
      }
      SyncBlock();
    }
  }

 private:
  // Terms of queries beside keys of a family (KvTypeTraits).
  static constexpr KVANTA_DEVICE int Terms(DecodeKind kind) {
    return kind == DecodeKind::kF32 ? 3 : kind == DecodeKind::kBf16 ? 2 : 1;
  }

  // The block's shared memory. Weights lie where query rows were.
  struct At {
    static constexpr int kScales = 0;
    static constexpr int kBias = kScales + 4 * kQueryRows;
    static constexpr int kSums = kBias + 4 * kQueryRows;
    static constexpr int kPeaks = kSums + 4 * kQueryRows;  // of each warp's chunk
    static constexpr int kWarpSums = kPeaks + kAttendWarps * 4 * kQueryRows;
    static constexpr int kPages = kWarpSums + kAttendWarps * 4 * kQueryRows;
    static constexpr int kSplitPages = kSplitTokens / kMinPage;  // at most
    static constexpr int kStage = kPages + kSplitPages * 8;
    static constexpr int kWeightBytes = 4 * 16 * kWarp;  // of a chunk

    // Of formats that are not quantized there are no exact pages.
    static constexpr KVANTA_DEVICE bool HasExact(const AttentionParams& layer) { return layer.exact.base != nullptr; }
    static constexpr KVANTA_DEVICE int Queries(const AttentionParams& layer) {
      const int rows = kQueryRows * (QueryRows::RowBytes(layer.head_dim) + QueryRows::RowBytes(layer.unquantized_dim));
      const int probs = kAttendWarps * kWeightBytes;
      return kStage + (rows > probs ? rows : probs);
    }
    static constexpr KVANTA_DEVICE int ExactQueries(const AttentionParams& layer) {
      return Queries(layer) + QueryBytes(Terms(layer.k_type.kind), layer.head_dim);
    }
    static constexpr KVANTA_DEVICE int UnquantizedQueries(const AttentionParams& layer) {
      return ExactQueries(layer) + (HasExact(layer) ? QueryBytes(2, layer.head_dim) : 0);
    }
  };

  static KVANTA_DEVICE void AttendSplit(const AttentionParams& layer, const QueryTile& tile, int run, int slot,
                                        bool first) {
    const int lane = ThreadIndex() % kWarp;
    const int warp = ThreadIndex() / kWarp;
    const int channels = layer.head_dim - warp * kLatentChannels;  // of this warp and later ones; there may be none
    Outputs outputs;
    const float zeros[4][4] = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) outputs.Put(block, zeros);
    TileRows rows;
    int tokens[2];
    BeginRows(tile, layer.k_type.kind, lane, rows, tokens);

    const int step = layer.page_size < kChunkTokens ? layer.page_size : kChunkTokens;
    const int run_begin = run * kSplitTokens;
    const int last = tile.first + tile.tokens - 1;
    const int end = last + 1 < run_begin + kSplitTokens ? last + 1 : run_begin + kSplitTokens;
    const int unseen = layer.sliding_window > 0 ? tile.first - layer.sliding_window + 1 - run_begin : 0;
    const int begin = run_begin + (unseen > 0 ? unseen / (kAttendWarps * step) * (kAttendWarps * step) : 0);
    const PageWindow pages{At::kPages, run_begin >> layer.page_shift};
    pages.Load(layer, tile, end, ThreadIndex(), At::kSplitPages);
    SyncBlock();
    for (int four = begin; four < end; four += kAttendWarps * step) {
      float s[4][4];
      const int own = four + warp * step;
      if (own < end) {
        Score(layer, tile, own, pages, tokens, lane, s);
      } else {
        KVANTA_UNROLL
        for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = kMinusInfinity;
      }
      float decay[2];
      MultiplyWeights(warp, lane, s, rows, decay);
      for (int chunk = 0; chunk < kAttendWarps && four + chunk * step < end; ++chunk) {
        if (channels <= 0) break;
        AddValues(layer, tile, four + chunk * step, pages, tokens, At::kStage + chunk * At::kWeightBytes + 16 * lane,
                  warp, lane, decay, rows, outputs);
        decay[0] = decay[1] = 1;
      }
    }
    StoreRun(layer, tile, slot, first, warp, lane, rows, outputs);
  }

  static KVANTA_DEVICE void Score(const AttentionParams& layer, const QueryTile& tile, int position,
                                  const PageWindow& pages, const int (&tokens)[2], int lane, float (&s)[4][4]) {
    const Location at = pages.LookUpPage(layer, tile, position);
    const CellPlace& place = at.exact ? layer.exact_k : layer.k;
    const float scale = layer.softmax_scale * (layer.softcap > 0 ? 1.0F : kLog2E);
    float query[2];
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) query[row] = LoadShared<float>(At::kScales + 4 * (lane / 4 + 8 * row)) * scale;
    Sides::Of(at.exact ? DecodeKind::kBf16 : layer.k_type.kind, layer.k_type, [&](auto side) {
      using Side = decltype(side);
      using Keys = KeyScores<Side, BlocksOf(kMaxLatentRank), false>;
      const RowScales scales{
          {(Side::kBf16 ? scale : query[0] * layer.k_type.unit), (Side::kBf16 ? scale : query[1] * layer.k_type.unit)},
          {}};
      const PageCell cell(at.record + place.first, place, CodeBytes(side, layer.head_dim), layer.page_size, at.slot);
      Keys::Scores(side, cell, layer.head_dim, at.exact ? At::ExactQueries(layer) : At::Queries(layer), lane, s);
      Keys::Scale(side, cell, scales, lane % 4, s);
    });
    UnquantizedKvTypes::Of(layer.unquantized_kind, layer.k_type, [&](auto side) {
      using Side = decltype(side);
      const float scales[2] = {Side::kBf16 ? scale : query[0], Side::kBf16 ? scale : query[1]};
      AddUnquantized<Side, BlocksOf(kMaxRopeDim)>(layer, side, tile, at, At::UnquantizedQueries(layer), scales, lane,
                                                  s);
    });
    const float bias[2] = {};
    Logits(layer, ViewOf(layer, tile, position, tokens), bias, lane % 4, s);
  }

  // Weights of the four chunks to shared memory, by the peak of all.
  static KVANTA_DEVICE void MultiplyWeights(int warp, int lane, float (&s)[4][4], TileRows& rows, float (&decay)[2]) {
    const auto peak_at = [lane](int of, int row) { return At::kPeaks + 4 * (of * kQueryRows + lane / 4 + 8 * row); };
    float argmaxes[2];
    Argmaxes(s, argmaxes);
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      if (lane % 4 == 0) StoreShared(peak_at(warp, row), argmaxes[row]);
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) {
        argmaxes[row] = fmaxf(argmaxes[row], LoadShared<float>(peak_at(other, row)));
      }
    }
    Softmax(argmaxes, s, rows, decay);
    SharedOutputs probs{At::kStage + warp * At::kWeightBytes + 16 * lane};
    probs.Put(0, s);
    SyncBlock();
  }

  static KVANTA_DEVICE void AddValues(const AttentionParams& layer, const QueryTile& tile, int position,
                                      const PageWindow& pages, const int (&tokens)[2], int probs, int warp, int lane,
                                      const float (&decay)[2], TileRows& rows, Outputs& outputs) {
    const Location at = pages.LookUpPage(layer, tile, position);
    const CellPlace& place = at.exact ? layer.exact_k : layer.k;
    const ChunkView chunk = ViewOf(layer, tile, position, tokens);
    float p[4][4];
    SharedOutputs{probs}.Take(0, p);
    Sides::Of(at.exact ? DecodeKind::kBf16 : layer.k_type.kind, layer.k_type, [&](auto side) {
      using Side = decltype(side);
      const int row_bytes = CodeBytes(side, layer.head_dim);
      const int first = warp * kLatentChannels;
      const LatentCell cell(PageCell(at.record + place.first, place, row_bytes, layer.page_size, at.slot), row_bytes,
                            first);
      WeightedValues<Side, Outputs, LatentOperand<Side>>::Add(layer, side, cell, tile, chunk, position,
                                                              layer.head_dim - first, p, decay,
                                                              at.exact ? 1.0F : layer.k_type.unit, lane, rows, outputs);
    });
  }

  // The run's result, into the task's so far. All warps have the same peaks; each has the weights of its own chunks.
  static KVANTA_DEVICE void StoreRun(const AttentionParams& layer, const QueryTile& tile, int slot, bool first,
                                     int warp, int lane, TileRows& rows, const Outputs& outputs) {
    const auto sum_at = [lane](int of, int row) { return At::kWarpSums + 4 * (of * kQueryRows + lane / 4 + 8 * row); };
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      rows.sum[row] += ShuffleXor(rows.sum[row], 1);
      rows.sum[row] += ShuffleXor(rows.sum[row], 2);
      if (lane % 4 == 0) StoreShared(sum_at(warp, row), rows.sum[row]);
    }
    SyncBlock();
    float* const states = layer.step->split_state + int64_t{slot} * 2;
    const int count = tile.tokens * tile.heads;
    float argmaxes[2], sums[2];  // of the task, with this run
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int of = lane / 4 + 8 * row;
      float sum = 0;
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) sum += LoadShared<float>(sum_at(other, row));
      const bool has_more = !first && of < count;
      const float before_max = has_more ? states[2 * of] : kMinusInfinity;
      const float before_sum = has_more ? states[2 * of + 1] : 0.0F;
      const float unit = PowerOfTwo(rows.exponent[row] - kTopExponent);
      float* const to = layer.step->split_out + (int64_t{slot} + of) * layer.head_dim;
      KVANTA_UNROLL
      for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
        float out[4][4];
        outputs.Take(block, out);
        const int channel = warp * kLatentChannels + 32 * block + lane % 4 * 8;
        float more[8], total[8] = {};
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) {
          more[i] = out[i % 4][2 * row + i / 4] * unit;
          if (has_more && channel < layer.head_dim) total[i] = to[channel + i];
        }
        argmaxes[row] = before_max;
        sums[row] = before_sum;
        CombineInto(argmaxes[row], sums[row], rows.max_value[row], sum, total, more, 8);
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (of < count && channel < layer.head_dim) to[channel + i] = total[i];
        }
      }
    }
    SyncBlock();
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      const int of = lane / 4 + 8 * row;
      if (warp != 0 || lane % 4 != 0 || of >= count) continue;
      states[2 * of] = argmaxes[row];
      states[2 * of + 1] = sums[row];
    }
  }
};

}  // namespace kvanta::kernels::cuda
