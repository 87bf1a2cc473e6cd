// O^T += V^T P^T of a tile and a chunk, for one value type. Include the primitives first.
#pragma once

#include <type_traits>

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/outputs.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// ValueLoader: loads and decodes a lane's values. kAllVisible: the chunk is fully visible.
template <class KvType, class Outputs, bool kAllVisible, class ValueLoader = ValueOperand<KvType>>
struct WeightedValues {
  using Operand = ValueLoader;
  static constexpr bool kIsLatent = !std::is_same_v<ValueLoader, ValueOperand<KvType>>;
  static constexpr int kRowTiles = Outputs::kRowTiles;
  static constexpr int kBlocks = Outputs::kMaxBlocks;
  static constexpr int kUnroll = Outputs::kUnrolled ? kBlocks : 1;
  using Fragments = RowFragments<kRowTiles>;
  using Chunk = ChunkView<kRowTiles>;
  // B operands of two steps of 16 tokens.
  struct ScaledProbs {
    uint32_t word[kRowTiles][2][KvType::kTerms][2];

    // In shared memory, 16 bytes of a lane for each row tile and term.
    KVANTA_DEVICE void Store(int at) const {
      KVANTA_UNROLL
      for (int i = 0; i < kRowTiles * KvType::kTerms; ++i) {
        Vec4 vec;
        for (int j = 0; j < 4; ++j) vec.word[j] = word[i / KvType::kTerms][j / 2][i % KvType::kTerms][j % 2];
        StoreShared(at + i * (16 * kWarp), vec);
      }
    }
    KVANTA_DEVICE void Load(int at) {
      KVANTA_UNROLL
      for (int i = 0; i < kRowTiles * KvType::kTerms; ++i) {
        const auto vec = LoadShared<Vec4>(at + i * (16 * kWarp));
        for (int j = 0; j < 4; ++j) word[i / KvType::kTerms][j / 2][i % KvType::kTerms][j % 2] = vec.word[j];
      }
    }
  };

  // p: probabilities. `rescale`: factor for the outputs so far, since the maximum has risen. `value_scale`: the
  // operands' static scale.
  template <class Cell>
  static KVANTA_DEVICE void Add(const AttentionParams& params, const KvType& type, const Cell& cell,
                                const QueryTile& tile, const Chunk& chunk, int position, int head_dim,
                                const Fragments& p, const RowValues<kRowTiles>& rescale, float value_scale, int lane,
                                RowState<kRowTiles>& state, Outputs& outputs) {
    const int g = lane / 4;
    float scales[4];
    TokenScales(type, cell, g, scales);
    RowValues<kRowTiles> factor;
    ForRows<kRowTiles>([&](int row_tile, int q) { factor[row_tile][q] = rescale[row_tile][q]; });
    if constexpr (Cell::kIsDecoded) {
      if constexpr (!KvType::kBf16) {
        const int exponent = ExponentOfScales(cell.LargestScale(value_scale));
        ForRows<kRowTiles>(
            [&](int row_tile, int q) { RaiseExponent(exponent, state.exponent[row_tile][q], factor[row_tile][q]); });
      }
    } else if constexpr (!KvType::kBf16) {
      RowValues<kRowTiles> largest = {};
      IncludeScales(type, cell, chunk, head_dim, scales, value_scale, g, largest);
      RaiseExponents(largest, state, factor);
    }
    const bool rescales = Rescales(factor);
    RowValues<kRowTiles> units;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      units[row_tile][q] = PowerOfTwo(kTopExponent - state.exponent[row_tile][q]) * value_scale;
    });
    AddInUnits(params, type, cell, tile, chunk, position, head_dim, p, scales, units, rescales, factor, lane, state,
               outputs);
  }

  // Raises `largest`, of a lane's tokens, to the scales that each row sees. scales: of tokens.
  template <class Cell>
  static KVANTA_DEVICE void IncludeScales(const KvType& type, const Cell& cell, const Chunk& chunk, int head_dim,
                                          const float (&scales)[4], float value_scale, int g,
                                          RowValues<kRowTiles>& largest) {
    const bool blocks = ScalesBlocks(type);
    float of_token[4];
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) of_token[i] = blocks ? 0.0F : fabsf(scales[i]);
    if (blocks) {
      KVANTA_UNROLL_BY(kUnroll)
      for (int block = 0; block < kBlocks; block += BlocksPerScale<KvType>()) {
        if (32 * block >= head_dim) break;
        float block_scales[4];
        BlockScales(type, cell, head_dim, block, g, block_scales);
        KVANTA_UNROLL
        for (int i = 0; i < 4; ++i) of_token[i] = fmaxf(of_token[i], fabsf(block_scales[i]));
      }
    }
    ForRows<kRowTiles>([&](int row_tile, int q) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        if (IsVisible(chunk, row_tile, q, 4 * g + i)) {
          largest[row_tile][q] = fmaxf(largest[row_tile][q], of_token[i] * fabsf(value_scale));
        }
      }
    });
  }
  // Raises each row's exponent to that of its largest scale, so that probabilities times scales fit f16. `factor`: for
  // the outputs so far.
  static KVANTA_DEVICE void RaiseExponents(const RowValues<kRowTiles>& largest, RowState<kRowTiles>& state,
                                           RowValues<kRowTiles>& factor) {
    const int of_all = kAllVisible ? ExponentOfScales(RowMaximum(largest[0][0])) : 0;
    ForRows<kRowTiles>([&](int row_tile, int q) {
      const int exponent = kAllVisible ? of_all : ExponentOfScales(RowMaximum(largest[row_tile][q]));
      RaiseExponent(exponent, state.exponent[row_tile][q], factor[row_tile][q]);
    });
  }
  // True if a row of the warp's has a factor other than 1.
  static KVANTA_DEVICE bool Rescales(const RowValues<kRowTiles>& factor) {
    bool rescales = false;
    ForRows<kRowTiles>([&](int row_tile, int q) { rescales = rescales || factor[row_tile][q] != 1; });
    return AnyLane(rescales);
  }

  // Adds values times probabilities times `units`, to the outputs, which `factor` rescales first if `rescales`. scales:
  // of tokens.
  template <class Cell>
  static KVANTA_DEVICE void AddInUnits(const AttentionParams& params, const KvType& type, const Cell& cell,
                                       const QueryTile& tile, const Chunk& chunk, int position, int head_dim,
                                       const Fragments& p, float (&scales)[4], const RowValues<kRowTiles>& units,
                                       bool rescales, const RowValues<kRowTiles>& factor, int lane,
                                       const RowState<kRowTiles>& state, Outputs& outputs) {
    const int g = lane / 4;
    const bool blocks = ScalesBlocks(type);
    Fragments in_units;  // probabilities times the operands' static scale, in units of the outputs
    MultiplyRows(p, units, in_units);
    RowValues<kRowTiles> offsets = {};  // zero points are in the values' own unit
    if (type.HasTokenOffset()) OffsetSums(cell.TokenOffsets(4 * g), p, chunk, g, state, offsets);
    ScaledProbs probs;
    if (!blocks) ScaleProbs(in_units, scales, chunk, g, probs);
    KVANTA_UNROLL_BY(kUnroll)
    for (int block = 0; block < kBlocks; ++block) {
      if (32 * block >= head_dim) break;
      typename Operand::Raw raw;
      uint32_t factors[4] = {};
      if constexpr (!Cell::kIsDecoded) {
        Operand::Load(type, cell, head_dim, block, lane, raw);
        LoadFactors(type, cell, chunk, head_dim, block, lane, factors);
      }
      if (blocks && block % BlocksPerScale<KvType>() == 0) {
        BlockScales(type, cell, head_dim, block, g, scales);
        ScaleProbs(in_units, scales, chunk, g, probs);
      }
      if (type.HasBlockOffset()) OffsetSums(cell.BlockOffsets(block, 4 * g), p, chunk, g, state, offsets);
      Fragments out;
      outputs.Load(block, out);
      if (rescales) {
        KVANTA_UNROLL
        for (int i = 0; i < 8 * kRowTiles; ++i) out[i / 8][i / 4 % 2][i % 4] *= factor[i / 8][i % 2];
      }
      if (type.HasTokenOffset() || type.HasBlockOffset()) {
        KVANTA_UNROLL
        for (int i = 0; i < 8 * kRowTiles; ++i) out[i / 8][i / 4 % 2][i % 4] += offsets[i / 8][i % 2];
      }
      if constexpr (Cell::kIsDecoded) {
        const auto operands = [&](auto index, int /*code_term*/, Vec4(&a)[2]) {
          KVANTA_UNROLL
          for (int step = 0; step < 2; ++step) a[step] = cell.Operand(block, 2 * decltype(index)::value + step, lane);
        };
        AddProducts(operands, probs, out);
      } else if constexpr (!KvType::kHasNan || kAllVisible) {
        Accumulate<false>(type, raw, factors, probs, 0, kChunkTokens, lane, out);
      } else {
        AddTokens(params, type, raw, factors, probs, tile, chunk, position, chunk.fully_visible ? 1 : tile.tokens, lane,
                  out);
      }
      outputs.Store(block, out);
    }
  }

  // Operands of the probabilities of a fully visible chunk whose values have no scales; `units` as in AddInUnits.
  static KVANTA_DEVICE void Operands(const Fragments& p, const RowValues<kRowTiles>& units, ScaledProbs& probs) {
    static_assert(kAllVisible);
    Fragments in_units;
    MultiplyRows(p, units, in_units);
    ScaleProbs(in_units, {1, 1, 1, 1}, {}, 0, probs);
  }
  // AddInUnits with these operands.
  template <class Cell>
  static KVANTA_DEVICE void AddOperands(const KvType& type, const Cell& cell, int head_dim, const ScaledProbs& probs,
                                        int lane, Outputs& outputs) {
    KVANTA_UNROLL_BY(kUnroll)
    for (int block = 0; block < kBlocks; ++block) {
      if (32 * block >= head_dim) break;
      typename Operand::Raw raw;
      uint32_t factors[4] = {};
      Operand::Load(type, cell, head_dim, block, lane, raw);
      LoadFactors(type, cell, {}, head_dim, block, lane, factors);
      Fragments out;
      outputs.Load(block, out);
      Accumulate<false>(type, raw, factors, probs, 0, kChunkTokens, lane, out);
      outputs.Store(block, out);
    }
  }

  // Decodes a block to `to`.
  template <class Cell, class Decoded>
  static KVANTA_DEVICE void Decode(const KvType& type, const Cell& cell, int head_dim, int block, int lane,
                                   const Decoded& to) {
    static_assert(kAllVisible);
    typename Operand::Raw raw;
    Operand::Load(type, cell, head_dim, block, lane, raw);
    uint32_t factors[4] = {};
    LoadFactors(type, cell, {}, head_dim, block, lane, factors);
    const auto channels = [&](auto index) {
      Vec4 a[2];
      OperandsOf<decltype(index)::value, false>(type, raw, factors, 0, kChunkTokens, lane, 0, a);
      KVANTA_UNROLL
      for (int step = 0; step < 2; ++step) to.SetOperand(block, 2 * decltype(index)::value + step, lane, a[step]);
    };
    channels(std::integral_constant<int, 0>{});
    channels(std::integral_constant<int, 1>{});
  }

 private:
  // Products cover all rows of the tile; where rows see different tokens, each query token takes its rows from a
  // product over the tokens that it sees (a masked NaN must not reach it). `count`: 1, or the tile's number of query
  // tokens.
  static KVANTA_DEVICE void AddTokens(const AttentionParams& params, const KvType& type,
                                      const typename Operand::Raw& raw, const uint32_t (&factors)[4],
                                      const ScaledProbs& probs, const QueryTile& tile, const Chunk& chunk, int position,
                                      int count, int lane, Fragments& out) {
    for (int token = 0; token < count; ++token) {
      int begin = 0;
      int end = 0;
      VisibleRange(params, tile, token, position, ChunkTokens(params), begin, end);
      // A page of copies may have fewer tokens.
      if (kIsLatent && end > chunk.visible_end) end = chunk.visible_end;
      if (begin >= end) continue;
      Fragments sums;
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) sums[i / 8][i / 4 % 2][i % 4] = out[i / 8][i / 4 % 2][i % 4];
      Accumulate<true>(type, raw, factors, probs, begin, end, lane, sums);
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) {
        if (count == 1 || chunk.token[i / 8][i % 2] == token)
          out[i / 8][i / 4 % 2][i % 4] = sums[i / 8][i / 4 % 2][i % 4];
      }
    }
  }

  static KVANTA_DEVICE bool IsVisible(const Chunk& chunk, int row_tile, int q, int token) {
    return kAllVisible || (token >= chunk.begin[row_tile][q] && token < chunk.end[row_tile][q]);
  }

  static KVANTA_DEVICE void MultiplyRows(const Fragments& p, const RowValues<kRowTiles>& by, Fragments& to) {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) to[i / 8][i / 4 % 2][i % 4] = p[i / 8][i / 4 % 2][i % 4] * by[i / 8][i % 2];
  }
  // Probabilities times scales as operands. `scales`: of tokens 4 g to 4 g + 3.
  static KVANTA_DEVICE void ScaleProbs(const Fragments& p, const float (&scales)[4], const Chunk& chunk, int g,
                                       ScaledProbs& operands) {
    KVANTA_UNROLL
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float x[2];
        KVANTA_UNROLL
        for (int q = 0; q < 2; ++q) {
          x[q] = p[row_tile][j / 2][j % 2 * 2 + q] * scales[j];
          if (!IsVisible(chunk, row_tile, q, 4 * g + j)) x[q] = 0.0F;
        }
        KVANTA_UNROLL
        for (int term = 0; term < KvType::kTerms; ++term) {
          operands.word[row_tile][j / 2][term][j % 2] = Transpose8x8(NextTerm<KvType>(x));
        }
      }
    }
  }

  // Contribution of offsets (fp16, of tokens 4 g to 4 g + 3) to all channels that share them.
  static KVANTA_DEVICE void OffsetSums(const Vec2& vec, const Fragments& p, const Chunk& chunk, int g,
                                       const RowState<kRowTiles>& state, RowValues<kRowTiles>& sums) {
    float offsets[4];
    F16ToFloats(vec, offsets);
    ForRows<kRowTiles>([&](int row_tile, int q) {
      float sum = 0;
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float offset = IsVisible(chunk, row_tile, q, 4 * g + j) ? offsets[j] : 0.0F;
        sum = MultiplyAdd(p[row_tile][j / 2][j % 2 * 2 + q], offset, sum);
      }
      sums[row_tile][q] = RowSum(sum) * PowerOfTwo(kTopExponent - state.exponent[row_tile][q]);
    });
  }

  // Factors folded into the operands: pairs (token j, token 4 + j) of tokens 8 t to 8 t + 7, zeros for tokens that no
  // row sees (their scales may be NaN).
  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const KvType& type, const Cell& cell, const Chunk& chunk, int head_dim,
                                        int block, int lane, uint32_t (&factors)[4]) {
    const int t = lane % 4;
    const int half = 2 * block + lane / 16;
    if (type.BlockScaling() == BlockScale::kE4m3Halves) {
      E4m3ScalePairs(HalfBytes8(cell, head_dim, half, 8 * t), factors);
      if (!kAllVisible && !chunk.fully_visible) {
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) Mask(factors[j], 8 * t + j, chunk.visible_begin, chunk.visible_end);
      }
    }
    if (type.BlockScaling() == BlockScale::kPowerHalves) {
      const Vec2 own = HalfBytes8(cell, head_dim, half, 8 * t);
      const Vec2 other = HalfBytes8(cell, head_dim, half ^ 1, 8 * t);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        factors[j] = HalfFactor(ByteOf(own.word[0], j), ByteOf(other.word[0], j)) |
                     (HalfFactor(ByteOf(own.word[1], j), ByteOf(other.word[1], j)) << 16U);
      }
    }
  }
  // Zeroes those of tokens `token` and `token` + 4 that are outside [begin, end).
  static KVANTA_DEVICE void Mask(uint32_t& pair, int token, int begin, int end) {
    if (token < begin || token >= end) pair &= 0xffff0000U;
    if (token + 4 < begin || token + 4 >= end) pair &= 0x0000ffffU;
  }

  // The A operands of tile kTile of channels of a block, for two steps of 16 tokens; term `code_term` of f32 codes.
  // kMasked: values of tokens outside [begin, end) are zeroed.
  template <int kTile, bool kMasked>
  static KVANTA_DEVICE void OperandsOf(const KvType& type, const typename Operand::Raw& raw,
                                       const uint32_t (&factors)[4], int begin, int end, int lane, int code_term,
                                       Vec4 (&a)[2]) {
    const bool halves =
        type.BlockScaling() == BlockScale::kE4m3Halves || type.BlockScaling() == BlockScale::kPowerHalves;
    const auto pairs_of = [&](auto index, uint32_t(&pairs)[4]) {
      Operand::template Pairs<decltype(index)::value>(type, raw, lane / 4, code_term, pairs);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        if (halves) pairs[j] = MultiplyF16(pairs[j], factors[j]);
        if constexpr (kMasked) Mask(pairs[j], 8 * (lane % 4) + j, begin, end);
      }
    };
    uint32_t first[4];
    uint32_t second[4];
    pairs_of(std::integral_constant<int, 2 * kTile>{}, first);
    pairs_of(std::integral_constant<int, 2 * kTile + 1>{}, second);
    KVANTA_UNROLL
    for (int step = 0; step < 2; ++step) {
      a[step] = {{first[2 * step], second[2 * step], first[2 * step + 1], second[2 * step + 1]}};
    }
  }

  // Adds the products of a block of 32 channels. kMasked: values of tokens outside [begin, end) are zeroed first.
  template <bool kMasked>
  static KVANTA_DEVICE void Accumulate(const KvType& type, const typename Operand::Raw& raw,
                                       const uint32_t (&factors)[4], const ScaledProbs& probs, int begin, int end,
                                       int lane, Fragments& out) {
    const auto operands = [&](auto index, int code_term, Vec4(&a)[2]) {
      OperandsOf<decltype(index)::value, kMasked>(type, raw, factors, begin, end, lane, code_term, a);
    };
    AddProducts(operands, probs, out);
  }
  // operands(tile, code_term, a): OperandsOf of the block.
  template <class Operands>
  static KVANTA_DEVICE void AddProducts(Operands operands, const ScaledProbs& probs, Fragments& out) {
    const auto channels = [&](auto index) {
      constexpr int kTile = decltype(index)::value;
      KVANTA_UNROLL
      for (int code_term = 0; code_term < KvType::kCodeTerms; ++code_term) {
        Vec4 a[2];
        operands(index, code_term, a);
        KVANTA_UNROLL
        for (int step = 0; step < 2; ++step) {
          KVANTA_UNROLL
          for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
            KVANTA_UNROLL
            for (int term = 0; term + code_term < KvType::kTerms; ++term) {
              const auto& b = probs.word[row_tile][step][term];
              Mma<KvType::kBf16>(out[row_tile][kTile], a[step], b[0], b[1]);
            }
          }
        }
      }
    };
    channels(std::integral_constant<int, 0>{});
    channels(std::integral_constant<int, 1>{});
  }
};

}  // namespace kvanta::kernels::cuda
