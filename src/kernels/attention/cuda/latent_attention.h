// Attention over latents (MLA): one cell holds keys and values, shared by all query heads. Include the primitives
// first.
//
// A block computes the attention of one query tile, or of a tile group, to one KV split of 1,024 tokens, 128 tokens at
// a time (64 in pages of 16): each of four warps computes the scores of one chunk; row maxima and probabilities are
// exchanged through shared memory; then each warp accumulates 128 channels over all four chunks, so that outputs of 512
// channels fit into registers. A group's rows are in two parts, with four warps each: a warp decodes what it reads for
// all 32 rows of its part. A row's operations depend on its position alone, as in attention_block.h.
#pragma once

#include "kernels/attention/cuda/combine_block.h"
#include "kernels/attention/cuda/latent_rows.h"
#include "kernels/attention/cuda/latent_values.h"
#include "kernels/attention/cuda/scores.h"
#include "kernels/attention/cuda/weighted_values.h"

namespace kvanta::kernels::cuda {

inline constexpr int kLatentChannels = kMaxLatentRank / kAttendWarps;  // channels per warp

// Kernel: the types of latents as they are stored (StoredTypes), and of exact pages, too (KvTypes), and of rotated
// channels (RotatedTypes); channels of both, 0: any number (kRank, kRotated); the most query tiles of a block (kTiles),
// and the equal parts that their rows have (kParts); whether values have no scales but those in their operands
// (kHasNoScales).
template <class Kernel>
struct LatentAttention {
  using Rows = LatentRows<Kernel>;
  using Layout = typename Rows::Layout;
  using Warp = typename Rows::Warp;
  static constexpr int kTiles = Kernel::kTiles;
  static constexpr int kParts = Kernel::kParts;
  static constexpr int kRowTiles = Rows::kRowTiles;
  static constexpr int kRows = Rows::kRows;
  static constexpr int kThreads = Rows::kThreads;
  using Outputs = RegisterOutputs<kRowTiles, BlocksOf(kLatentChannels)>;
  template <class KvType, bool kPlain>
  using Weighted = WeightedValues<KvType, Outputs, kPlain, LatentOperand<KvType>>;
  template <bool kPlain>
  using StoredValues = Weighted<typename Kernel::StoredTypes::Stored, kPlain>;

  static constexpr int SharedBytes(const AttentionParams& params) {
    return Layout::RotatedQueries(params, 0) + kParts * Layout::RotatedQueryBytes(params);
  }

  // Computes the block's tasks. A type, not a lambda, which nvcc would call as a function.
  static KVANTA_DEVICE void Run(const AttentionParams& params, const AttentionMetadata& metadata) {
    struct AttendTask {
      const AttentionParams& params;
      const AttentionMetadata& metadata;

      KVANTA_DEVICE void operator()(const SplitTask& task) const { Attend(params, metadata, task); }
    };
    ForTasks(metadata, AttendTask{params, metadata});
  }

 private:
  // True if a group's probabilities are the same operands for all channels: then each is made once.
  template <bool kPlain>
  static constexpr bool kSharesOperands = kPlain&& kTiles > 1 && Kernel::kHasNoScales;
  // Ends with a block barrier.
  static KVANTA_DEVICE void Attend(const AttentionParams& params, const AttentionMetadata& metadata,
                                   const SplitTask& task) {
    const QueryTile* const tiles = metadata.tiles + task.tile;
    for (int i = 0; i < kTiles; ++i) {
      if (i > 0) SyncBlock();  // the rows of the tile before have been packed
      Rows::LoadQueries(params, tiles, task.tiles, i);
    }
    QueryTile tokens = tiles[0];  // the tiles' query tokens
    if constexpr (kTiles > 1) {
      const QueryTile last = tiles[task.tiles - 1];
      tokens.tokens = static_cast<int16_t>(last.first_position + last.tokens - tokens.first_position);
    }
    const int warp = ThreadIndex() / kWarp;
    const Warp own{.tokens = tokens,
                   .lane = ThreadIndex() % kWarp,
                   .index = warp % kAttendWarps,
                   .part = kParts == 1 ? 0 : warp / kAttendWarps};
    for (int split = task.first_split; split < task.last_split; ++split) {
      SyncBlock();
      const int index_in_task = split - task.first_split;
      AttendSplit(params, metadata, own, split, task.result_row + index_in_task * task.result_rows,
                  index_in_task == 0 || task.result_rows != 0);
    }
    SyncBlock();
  }

  static KVANTA_DEVICE void AttendSplit(const AttentionParams& params, const AttentionMetadata& metadata,
                                        const Warp& warp, int split, int result_row, bool first) {
    const QueryTile& tokens = warp.tokens;
    Outputs outputs;
    const RowFragments<kRowTiles> zeros = {};
    KVANTA_UNROLL
    for (int block = 0; block < Outputs::kMaxBlocks; ++block) outputs.Store(block, zeros);
    RowState<kRowTiles> state;
    InitRowState<kRowTiles>(params.k_type.decode, state);
    Rows::SaveState(state);

    const int step = kAttendWarps * ChunkTokens(params);
    const int split_begin = split * kSplitTokens;
    const int end = VisibleEnd(params, tokens, split_begin + kSplitTokens);
    const auto pages = SharedPageTable::Gathered(params, tokens, Layout::kPages, split_begin >> params.page_shift);
    pages.Load(params, tokens, end, ThreadIndex(), Layout::kSplitPages);
    SyncBlock();
    for (int position = FirstVisibleStep(params, tokens, split_begin, step); position < end; position += step) {
      for (; IsPlain(params, tokens, pages, position, end); position += step) {
        AttendChunks<true>(params, warp, position, end, pages, outputs);
      }
      if (position < end) AttendChunks<false>(params, warp, position, end, pages, outputs);
    }
    Rows::LoadState(state);
    StoreSplit(params, metadata, warp, result_row, first, state, outputs);
  }

  // True if four chunks of 32 tokens from `position` on are in the stored format and visible to all rows.
  static KVANTA_DEVICE bool IsPlain(const AttentionParams& params, const QueryTile& tokens,
                                    const SharedPageTable& pages, int position, int end) {
    const int last_chunk = position + (kAttendWarps - 1) * kChunkTokens;
    const FullyVisible visible(params, tokens);
    if (ChunkTokens(params) != kChunkTokens || last_chunk >= end || position < visible.first ||
        last_chunk > visible.last || !pages.quantized.Contains(position >> params.page_shift) ||
        !pages.quantized.Contains(last_chunk >> params.page_shift)) {
      return false;
    }
    for (int chunk = position; params.gathered != nullptr && chunk <= last_chunk; chunk += kChunkTokens) {
      if (TokensOfChunk<true>(params, tokens, chunk) != kChunkTokens) return false;
    }
    return true;
  }

  // Attends to four chunks. kPlain: IsPlain.
  template <bool kPlain>
  static KVANTA_DEVICE void AttendChunks(const AttentionParams& params, const Warp& warp, int position, int end,
                                         const SharedPageTable& pages, Outputs& outputs) {
    const int tokens = kPlain ? kChunkTokens : ChunkTokens(params);
    RowFragments<kRowTiles> s;
    const int own = position + warp.index * tokens;
    if (kPlain || own < end) {
      Score<kPlain>(params, warp, own, pages, s);
    } else {
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) s[i / 8][i / 4 % 2][i % 4] = kMinusInfinity;
    }
    RowState<kRowTiles> state;
    Rows::LoadState(state);
    RowValues<kRowTiles> factor;  // of the outputs so far
    SoftmaxOfChunks(warp, s, state, factor);
    StoreProbs<kPlain>(params, warp, s, state, factor);
    SyncBlock();
    const int channels = Rows::Rank(params) - warp.index * kLatentChannels;  // left from the warp's first
    if (channels <= 0) return Rows::SaveState(state);
    const int g = warp.lane / 4;
    const auto for_chunks = [&](auto f) {
      for (int i = 0; i < kAttendWarps && (kPlain || position + i * tokens < end); ++i) {
        VisitValues<kPlain>(params, warp, position + i * tokens, pages, [&](const auto& chunk) { f(i, chunk); });
      }
    };
    using Stored = StoredValues<kPlain>;
    if constexpr (!kSharesOperands<kPlain>) {
      RowValues<kRowTiles> largest = {};
      for_chunks([&]<class Chunk>(int /*index*/, const Chunk& chunk) {
        if constexpr (!Chunk::KvType::kBf16) {
          float scales[4];
          TokenScales(chunk.type, chunk.cell, g, scales);
          Chunk::Values::IncludeScales(chunk.type, chunk.cell, chunk.view, channels, scales, chunk.scale, g, largest);
        }
      });
      Stored::RaiseExponents(largest, state, factor);
    }
    Rows::SaveState(state);
    if (Stored::Rescales(factor)) {
      KVANTA_UNROLL
      for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
        RowFragments<kRowTiles> out;
        outputs.Load(block, out);
        KVANTA_UNROLL
        for (int i = 0; i < 8 * kRowTiles; ++i) out[i / 8][i / 4 % 2][i % 4] *= factor[i / 8][i % 2];
        outputs.Store(block, out);
      }
    }
    for_chunks([&]<class Chunk>(int index, const Chunk& chunk) {
      const int own_channels = Kernel::kRank == kMaxLatentRank ? kLatentChannels : channels;
      const int probs_at = Layout::Probs(warp.part, index) + 16 * warp.lane;
      if constexpr (kSharesOperands<kPlain>) {
        typename Stored::ScaledProbs probs;
        probs.Load(probs_at);
        Stored::AddOperands(chunk.type, chunk.cell, own_channels, probs, warp.lane, outputs);
      } else {
        RowFragments<kRowTiles> p;
        SharedOutputs<kRowTiles>{probs_at}.Load(0, p);
        float scales[4];
        TokenScales(chunk.type, chunk.cell, g, scales);
        RowValues<kRowTiles> units;
        Units(state, chunk.scale, units);
        Chunk::Values::AddInUnits(params, chunk.type, chunk.cell, warp.tokens, chunk.view, position + index * tokens,
                                  own_channels, p, scales, units, false, units, warp.lane, state, outputs);
      }
    });
  }

  // Factors of probabilities.
  static KVANTA_DEVICE void Units(const RowState<kRowTiles>& state, float scale, RowValues<kRowTiles>& units) {
    ForRows<kRowTiles>([&](int row_tile, int q) {
      units[row_tile][q] = PowerOfTwo(kTopExponent - state.exponent[row_tile][q]) * scale;
    });
  }

  // Stores the probabilities of the warp's chunk, or their operands.
  template <bool kPlain>
  static KVANTA_DEVICE void StoreProbs(const AttentionParams& params, const Warp& warp,
                                       const RowFragments<kRowTiles>& p, RowState<kRowTiles>& state,
                                       RowValues<kRowTiles>& factor) {
    const int probs_at = Layout::Probs(warp.part, warp.index) + 16 * warp.lane;
    if constexpr (kSharesOperands<kPlain>) {
      using Stored = StoredValues<kPlain>;
      if constexpr (!Kernel::StoredTypes::Stored::kBf16) {
        const RowValues<kRowTiles> largest = {{fabsf(params.k_type.unit)}};  // of all rows
        Stored::RaiseExponents(largest, state, factor);
      }
      RowValues<kRowTiles> units;
      Units(state, params.k_type.unit, units);
      typename Stored::ScaledProbs probs;
      Stored::Operands(p, units, probs);
      probs.Store(probs_at);
    } else {
      SharedOutputs<kRowTiles>{probs_at}.Store(0, p);
    }
  }
  template <bool kPlain>
  static KVANTA_DEVICE ChunkLocation LookUpPage(const AttentionParams& params, const SharedPageTable& pages,
                                                int position) {
    if constexpr (!kPlain) return pages.LookUpPage(params, position);
    return {.record = params.quantized.Record(pages.QuantizedPage(params, position)),
            .token = position & (params.page_size - 1),
            .exact = false};
  }

  // Visits the type of a chunk's latents.
  template <bool kPlain, class F>
  static KVANTA_DEVICE void VisitType(const AttentionParams& params, const ChunkLocation& location, F visit) {
    if constexpr (kPlain) {
      Kernel::StoredTypes::Visit(params.k_type.decode, params.k_type, visit);
    } else {
      Kernel::KvTypes::Visit(location.exact ? DecodeKind::kBf16 : params.k_type.decode, params.k_type, visit);
    }
  }

  template <bool kPlain>
  static KVANTA_DEVICE void Score(const AttentionParams& params, const Warp& warp, int position,
                                  const SharedPageTable& pages, RowFragments<kRowTiles>& s) {
    const ChunkLocation location = LookUpPage<kPlain>(params, pages, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    const int rank = Rows::Rank(params);
    const int lane = warp.lane;
    const float scale = params.softmax_scale * (params.softcap > 0 ? 1.0F : kLog2E);
    // Factors of the rows' dots, read when they are needed: registers are scarce.
    const auto row_scale = [&](int row_tile, int q) {
      return LoadShared<float>(Layout::kScales + 4 * warp.Row(row_tile, q)) * scale;
    };
    VisitType<kPlain>(params, location, [&]<class KvType>(const KvType& type) {
      using Keys = KeyScores<KvType, kRowTiles, BlocksOf(kMaxLatentRank), false>;
      const PageCell cell(location.record + offsets.Cell(0), offsets, CodeBytes(type, rank), params.page_size,
                          location.token);
      if constexpr (kParts > 1 && KvType::kBf16 && !std::is_same_v<KvType, typename Kernel::StoredTypes::Stored>) {
        const QueryRowAddresses<KvType> rows{params.q, Layout::kOffsets + 8 * Rows::kPartRows * warp.part};
        Keys::Scores(type, cell, rank, rows, lane, s);
      } else {
        Keys::Scores(type, cell, rank,
                     location.exact ? Layout::ExactQueries(params) : Layout::Queries(params, warp.part), lane, s);
      }
      RowScales<kRowTiles> scales = {};
      ForRows<kRowTiles>([&](int row_tile, int q) {
        scales.row[row_tile][q] = KvType::kBf16 ? scale : row_scale(row_tile, q) * params.k_type.unit;
      });
      Keys::Scale(type, cell, scales, lane / 4, s);
    });
    Kernel::RotatedTypes::Visit(params.unquantized_decode, params.k_type, [&]<class KvType>(const KvType& type) {
      AddUnquantized<KvType, kRowTiles, BlocksOf(Kernel::kRotated != 0 ? Kernel::kRotated : kMaxRopeDim)>(
          params, type, warp.tokens, Rows::Rotated(params), location, Layout::RotatedQueries(params, warp.part),
          [&](int row_tile, int q) { return KvType::kBf16 ? scale : row_scale(row_tile, q); }, lane, s);
    });
    const RowValues<kRowTiles> bias = {};
    ToLogits<kRowTiles>(params, bias, s);
    if (!kPlain) MaskLogits<kRowTiles>(Rows::View(params, warp, position), lane / 4, s);
  }

  // Turns logits into probabilities, relative to the maximum of the four chunks.
  static KVANTA_DEVICE void SoftmaxOfChunks(const Warp& warp, RowFragments<kRowTiles>& s, RowState<kRowTiles>& state,
                                            RowValues<kRowTiles>& rescale) {
    const auto row_max_at = [&](int chunk, int row_tile, int q) {
      return Layout::kRowMax + 4 * (chunk * kRows + warp.Row(row_tile, q));
    };
    RowValues<kRowTiles> row_max;
    RowMax<kRowTiles>(s, row_max);
    ForRows<kRowTiles>([&](int row_tile, int q) {
      if (warp.lane < 4) StoreShared(row_max_at(warp.index, row_tile, q), row_max[row_tile][q]);
    });
    SyncBlock();
    ForRows<kRowTiles>([&](int row_tile, int q) {
      float& max = row_max[row_tile][q];
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) {
        max = fmaxf(max, LoadShared<float>(row_max_at(other, row_tile, q)));
      }
    });
    Softmax<kRowTiles>(row_max, s, state, rescale);
  }

  // A chunk's values from the warp's first channel on. scale: the static one.
  template <class Type, bool kPlain>
  struct ChunkValues {
    using KvType = Type;
    using Values = Weighted<KvType, kPlain>;

    KvType type;
    LatentCell cell;
    ChunkView<kRowTiles> view;
    float scale;
  };
  // Calls f(ChunkValues) for the chunk at `position`.
  template <bool kPlain, class F>
  static KVANTA_DEVICE void VisitValues(const AttentionParams& params, const Warp& warp, int position,
                                        const SharedPageTable& pages, F f) {
    const ChunkLocation location = LookUpPage<kPlain>(params, pages, position);
    const CellOffsets& offsets = location.exact ? params.exact_k : params.k;
    ChunkView<kRowTiles> view;
    if constexpr (!kPlain) view = Rows::View(params, warp, position);
    VisitType<kPlain>(params, location, [&]<class KvType>(const KvType& type) {
      const int row_bytes = CodeBytes(type, Rows::Rank(params));
      const PageCell cell(location.record + offsets.Cell(0), offsets, row_bytes, params.page_size, location.token);
      f(ChunkValues<KvType, kPlain>{type, LatentCell(cell, row_bytes, warp.index * kLatentChannels), view,
                                    location.exact ? 1.0F : params.k_type.unit});
    });
  }

  // Combines the split with the task's result so far. Row maxima are the same in all warps; each has the probability
  // sums of its own chunks.
  static KVANTA_DEVICE void StoreSplit(const AttentionParams& params, const AttentionMetadata& metadata,
                                       const Warp& warp, int result_row, bool first, RowState<kRowTiles>& state,
                                       const Outputs& outputs) {
    const int lane = warp.lane;
    const auto sum_at = [&](int chunk, int row_tile, int q) {
      return Layout::kWarpSums + 4 * (chunk * kRows + warp.Row(row_tile, q));
    };
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const float sum = RowSum(state.sum[row_tile][q]);
      if (lane < 4) StoreShared(sum_at(warp.index, row_tile, q), sum);
    });
    SyncBlock();
    const auto exists = [&](int row_tile, int q) {
      return LoadShared<int>(Layout::kPositions + 4 * warp.Row(row_tile, q)) >= 0;
    };
    const auto result_of = [&](int row_tile, int q) {
      return int64_t{result_row} + LoadShared<int>(Layout::kResults + 4 * warp.Row(row_tile, q));
    };
    RowValues<kRowTiles> row_max, sums;  // state of the task, including this split
    ForRows<kRowTiles>([&](int row_tile, int q) {
      float sum = 0;
      KVANTA_UNROLL
      for (int other = 0; other < kAttendWarps; ++other) sum += LoadShared<float>(sum_at(other, row_tile, q));
      const bool has_row = exists(row_tile, q);
      const bool has_previous = !first && has_row;
      const float* const states = metadata.split_state + result_of(row_tile, q) * 2;
      const float previous_max = has_previous ? states[0] : kMinusInfinity;
      const float previous_sum = has_previous ? states[1] : 0.0F;
      const float unit = PowerOfTwo(state.exponent[row_tile][q] - kTopExponent);
      float* const to = metadata.split_out + result_of(row_tile, q) * Rows::Rank(params);
      KVANTA_UNROLL
      for (int block = 0; block < Outputs::kMaxBlocks; ++block) {
        RowFragments<kRowTiles> out;
        outputs.Load(block, out);
        const int channel = warp.index * kLatentChannels + 32 * block + lane / 4 * 4;
        float values[4], total[4] = {};
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          values[i] = out[row_tile][i / 2][i % 2 * 2 + q] * unit;
          if (has_previous && channel < Rows::Rank(params)) total[i] = to[channel + i];
        }
        row_max[row_tile][q] = previous_max;
        sums[row_tile][q] = previous_sum;
        CombineInto(row_max[row_tile][q], sums[row_tile][q], state.max[row_tile][q], sum, total, values, 4);
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (has_row && channel < Rows::Rank(params)) to[channel + i] = total[i];
        }
      }
    });
    SyncBlock();
    ForRows<kRowTiles>([&](int row_tile, int q) {
      if (warp.index != 0 || lane >= 4 || !exists(row_tile, q)) return;
      float* const states = metadata.split_state + result_of(row_tile, q) * 2;
      states[0] = row_max[row_tile][q];
      states[1] = sums[row_tile][q];
    });
  }
};

}  // namespace kvanta::kernels::cuda
