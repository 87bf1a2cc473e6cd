// O += P V of a tile and a chunk, for one value type. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/outputs.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// ValueLoader: loads and decodes a lane's values.
template <class KvType, class Outputs, class ValueLoader = ValueOperand<KvType>>
struct WeightedValues {
  using Operand = ValueLoader;
  static constexpr int kBlocks = Outputs::kMaxBlocks;
  static constexpr int kUnroll = Outputs::kUnrolled ? kBlocks : 1;
  using ScaledProbs = Vec4[2][KvType::kTerms];  // two steps of 16 tokens

  // p: probabilities. `rescale`: factor for the outputs so far, since the maximum has risen. `value_scale`: the
  // operands' static scale.
  template <class Cell>
  static KVANTA_DEVICE void Add(const AttentionParams& params, const KvType& type, const Cell& cell,
                                const QueryTile& tile, const ChunkView& chunk, int position, int head_dim,
                                const float (&p)[4][4], const float (&rescale)[2], float value_scale, int lane,
                                RowState& state, Outputs& outputs) {
    const int t = lane % 4;
    const bool blocks = ScalesBlocks(type);
    float scales[8];
    TokenScales(type, cell, t, scales);
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) scales[i] *= value_scale;
    float factor[2] = {rescale[0], rescale[1]};
    if constexpr (!KvType::kBf16) {
      float largest[8];
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) largest[i] = blocks ? 0.0F : fabsf(scales[i]);
      if (blocks) {
        KVANTA_UNROLL_BY(kUnroll)
        for (int block = 0; block < kBlocks; ++block) {
          if (32 * block >= head_dim) break;
          float block_scales[8];
          BlockScales(type, cell, head_dim, block, t, block_scales);
          KVANTA_UNROLL
          for (int i = 0; i < 8; ++i) largest[i] = fmaxf(largest[i], fabsf(block_scales[i] * value_scale));
        }
      }
      UpdateExponents(largest, chunk, t, state, factor);
    }
    float offsets[2] = {0, 0};
    if (type.HasTokenOffset()) OffsetSums(cell.TokenOffsets(8 * t), p, chunk, t, state, offsets);
    ScaledProbs probs;
    if (!blocks) ScaleProbs(p, scales, chunk, t, state, probs);
    KVANTA_UNROLL_BY(kUnroll)
    for (int block = 0; block < kBlocks; ++block) {
      if (32 * block >= head_dim) break;
      typename Operand::Raw raw;
      Operand::Load(type, cell, head_dim, block, lane, raw);
      uint32_t factors[4] = {};
      LoadFactors(type, cell, chunk, head_dim, block, lane, factors);
      if (blocks) {
        BlockScales(type, cell, head_dim, block, t, scales);
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) scales[i] *= value_scale;
        ScaleProbs(p, scales, chunk, t, state, probs);
      }
      if (type.HasBlockOffset()) OffsetSums(cell.BlockOffsets(block, 8 * t), p, chunk, t, state, offsets);
      float out[4][4];
      outputs.Load(block, out);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) {
        float& x = out[i / 4][i % 4];
        x *= factor[i % 4 / 2];
        if (type.HasTokenOffset() || type.HasBlockOffset()) x += offsets[i % 4 / 2];
      }
      if constexpr (!KvType::kHasNan) {
        Accumulate<false>(type, raw, factors, probs, 0, kChunkTokens, lane, out);
      } else if constexpr (Outputs::kUnrolled) {
        if (chunk.fully_visible) {
          Accumulate<false>(type, raw, factors, probs, 0, kChunkTokens, lane, out);
        } else {
          AddTokens(params, type, raw, factors, probs, tile, chunk, position, tile.tokens, lane, out);
        }
      } else {
        AddTokens(params, type, raw, factors, probs, tile, chunk, position, chunk.fully_visible ? 1 : tile.tokens, lane,
                  out);
      }
      outputs.Store(block, out);
    }
  }

 private:
  // Products cover all rows of the tile; where rows see different tokens, each query token takes its rows from a
  // product over the tokens that it sees (a masked NaN must not reach it). `count`: 1, or the tile's number of query
  // tokens.
  static KVANTA_DEVICE void AddTokens(const AttentionParams& params, const KvType& type,
                                      const typename Operand::Raw& raw, const uint32_t (&factors)[4],
                                      const ScaledProbs& probs, const QueryTile& tile, const ChunkView& chunk,
                                      int position, int count, int lane, float (&out)[4][4]) {
    for (int token = 0; token < count; ++token) {
      int begin = 0;
      int end = 0;
      VisibleRange(params, tile.first_position + token, position, begin, end);
      if (begin >= end) continue;
      float sums[4][4];
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = out[i / 4][i % 4];
      Accumulate<true>(type, raw, factors, probs, begin, end, lane, sums);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (count == 1 || chunk.token[i % 4 / 2] == token) out[i / 4][i % 4] = sums[i / 4][i % 4];
      }
    }
  }

  static KVANTA_DEVICE bool IsVisible(const ChunkView& chunk, int row, int token) {
    return token >= chunk.begin[row] && token < chunk.end[row];
  }

  // Raises each row's exponent to that of the largest scale it sees, so that probabilities times scales fit f16.
  static KVANTA_DEVICE void UpdateExponents(const float (&scales)[8], const ChunkView& chunk, int t, RowState& state,
                                            float (&factor)[2]) {
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float largest = 0;
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (IsVisible(chunk, row, 8 * t + i)) largest = fmaxf(largest, scales[i]);
      }
      largest = fmaxf(largest, ShuffleXor(largest, 1));
      largest = fmaxf(largest, ShuffleXor(largest, 2));
      int exponent = ExponentOf(largest);
      if (exponent > kMaxExponent) exponent = kMaxExponent;
      if (exponent <= state.exponent[row]) continue;
      factor[row] *= PowerOfTwo(state.exponent[row] - exponent);
      state.exponent[row] = exponent;
    }
  }

  // Probabilities times scales as operands. `scales`: of tokens 8 t to 8 t + 7.
  static KVANTA_DEVICE void ScaleProbs(const float (&p)[4][4], const float (&scales)[8], const ChunkView& chunk, int t,
                                       const RowState& state, ScaledProbs& operands) {
    const float factors[2] = {PowerOfTwo(kTopExponent - state.exponent[0]),
                              PowerOfTwo(kTopExponent - state.exponent[1])};
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        float x[2];
        KVANTA_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = p[j][2 * row + i];
          x[i] = IsVisible(chunk, row, 8 * t + j + 4 * i) ? x[i] * scales[j + 4 * i] * factors[row] : 0.0F;
        }
        const int word = j % 2 * 2 + row;
        uint32_t high = KvType::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        operands[j / 2][0].word[word] = high;
        KVANTA_UNROLL
        for (int term = 1; term < KvType::kTerms; ++term) {
          x[0] -= std::bit_cast<float>(high << 16U);
          x[1] -= std::bit_cast<float>(high & 0xffff0000U);
          operands[j / 2][term].word[word] = high = PackBf16(x[0], x[1]);
        }
      }
    }
  }

  // Contribution of offsets (fp16, of tokens 8 t to 8 t + 7) to all channels that share them.
  static KVANTA_DEVICE void OffsetSums(const Vec4& vec, const float (&p)[4][4], const ChunkView& chunk, int t,
                                       const RowState& state, float (&sums)[2]) {
    float offsets[8];
    F16ToFloats(vec, offsets);
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float sum = 0;
      KVANTA_UNROLL
      for (int token = 0; token < 8; ++token) {
        const float offset = IsVisible(chunk, row, 8 * t + token) ? offsets[token] : 0.0F;
        sum = MultiplyAdd(p[token % 4][2 * row + token / 4], offset, sum);
      }
      sum += ShuffleXor(sum, 1);
      sum += ShuffleXor(sum, 2);
      sums[row] = sum * PowerOfTwo(kTopExponent - state.exponent[row]);
    }
  }

  // Factors folded into the operands: pairs (token j, token 4 + j), zeros for tokens that no row sees (their scales may
  // be NaN).
  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const KvType& type, const Cell& cell, const ChunkView& chunk, int head_dim,
                                        int block, int lane, uint32_t (&factors)[4]) {
    const int t = lane % 4;
    const int half = 2 * block + lane / 16;
    if (type.BlockScaling() == BlockScale::kE4m3Halves) {
      E4m3ScalePairs(HalfBytes8(cell, head_dim, half, 8 * t), factors);
      if (!chunk.fully_visible) {
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) Mask(factors[j], 8 * t + j, chunk.visible_begin, chunk.visible_end);
      }
    }
    if (type.BlockScaling() == BlockScale::kPowerHalves) {
      const Vec2 own = HalfBytes8(cell, head_dim, half, 8 * t);
      const Vec2 other = HalfBytes8(cell, head_dim, half ^ 1, 8 * t);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        factors[j] = HalfFactor(ByteOf(own, j), ByteOf(other, j)) |
                     (HalfFactor(ByteOf(own, 4 + j), ByteOf(other, 4 + j)) << 16U);
      }
    }
  }
  // Zeroes those of tokens `token` and `token` + 4 that are outside [begin, end).
  static KVANTA_DEVICE void Mask(uint32_t& pair, int token, int begin, int end) {
    if (token < begin || token >= end) pair &= 0xffff0000U;
    if (token + 4 < begin || token + 4 >= end) pair &= 0x0000ffffU;
  }

  // out += P V of a block of 32 channels. kMasked: values of tokens outside [begin, end) are zeroed first.
  template <bool kMasked>
  static KVANTA_DEVICE void Accumulate(const KvType& type, const typename Operand::Raw& raw,
                                       const uint32_t (&factors)[4], const ScaledProbs& probs, int begin, int end,
                                       int lane, float (&out)[4][4]) {
    const bool halves =
        type.BlockScaling() == BlockScale::kE4m3Halves || type.BlockScaling() == BlockScale::kPowerHalves;
    const auto channel = [&](auto index) {
      constexpr int kChannel = decltype(index)::value;
      KVANTA_UNROLL
      for (int code_term = 0; code_term < KvType::kCodeTerms; ++code_term) {
        uint32_t pairs[4];
        Operand::template Pairs<kChannel>(type, raw, lane / 4, code_term, pairs);
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) {
          if (halves) pairs[j] = MultiplyF16(pairs[j], factors[j]);
          if constexpr (kMasked) Mask(pairs[j], 8 * (lane % 4) + j, begin, end);
        }
        KVANTA_UNROLL
        for (int step = 0; step < 2; ++step) {
          KVANTA_UNROLL
          for (int term = 0; term + code_term < KvType::kTerms; ++term) {
            Mma<KvType::kBf16>(out[kChannel], probs[step][term], pairs[2 * step], pairs[2 * step + 1]);
          }
        }
      }
    };
    channel(std::integral_constant<int, 0>{});
    channel(std::integral_constant<int, 1>{});
    channel(std::integral_constant<int, 2>{});
    channel(std::integral_constant<int, 3>{});
  }
};

}  // namespace kvanta::kernels::cuda
