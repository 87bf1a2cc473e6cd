// O += P V of a tile and a chunk, for one side. A unit that includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

// OperandOf: how a lane has values.
template <class Side, class Outputs, class OperandOf = ValueOperand<Side>>
struct WeightedValues {
  using Operand = OperandOf;
  static constexpr int kBlocks = Outputs::kMaxBlocks;
  static constexpr int kUnroll = Outputs::kUnrolled ? kBlocks : 1;
  using ScaledProbs = Vec4[2][Side::kTerms];  // two steps of 16 tokens

  // p: weights of the tokens. `decay`: what has to be multiplied to what there is, for the peak has risen.
  // `value_scale`: of operands, the static one.
  template <class Cell>
  static KVANTA_DEVICE void Add(const AttentionParams& layer, const Side& side, const Cell& cell, const QueryTile& tile,
                                const ChunkView& chunk, int position, int head_dim, const float (&p)[4][4],
                                const float (&decay)[2], float value_scale, int lane, TileRows& rows,
                                Outputs& outputs) {
    const int t = lane % 4;
    const bool blocks = ScalesBlocks(side);
    float scales[8];
    TokenScales(side, cell, t, scales);
    KVANTA_UNROLL
    for (int i = 0; i < 8; ++i) scales[i] *= value_scale;
    float factor[2] = {decay[0], decay[1]};
    if constexpr (!Side::kBf16) {
      float largest[8];
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) largest[i] = blocks ? 0.0F : fabsf(scales[i]);
      if (blocks) {
        KVANTA_UNROLL_BY(kUnroll)
        for (int block = 0; block < kBlocks; ++block) {
          if (32 * block >= head_dim) break;
          float of_block[8];
          BlockScales(side, cell, head_dim, block, t, of_block);
          KVANTA_UNROLL
          for (int i = 0; i < 8; ++i) largest[i] = fmaxf(largest[i], fabsf(of_block[i] * value_scale));
        }
      }
      FollowScales(largest, chunk, t, rows, factor);
    }
    float zeros[2] = {0, 0};
    if (side.TokenOffset()) ZeroSums(cell.TokenOffsets(8 * t), p, chunk, t, rows, zeros);
    ScaledProbs probs;
    if (!blocks) ScaleProbs(p, scales, chunk, t, rows, probs);
    KVANTA_UNROLL_BY(kUnroll)
    for (int block = 0; block < kBlocks; ++block) {
      if (32 * block >= head_dim) break;
      typename Operand::Words words;
      Operand::Load(side, cell, head_dim, block, lane, words);
      uint32_t factors[4] = {};
      LoadFactors(side, cell, chunk, head_dim, block, lane, factors);
      if (blocks) {
        BlockScales(side, cell, head_dim, block, t, scales);
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) scales[i] *= value_scale;
        ScaleProbs(p, scales, chunk, t, rows, probs);
      }
      if (side.BlockOffset()) ZeroSums(cell.BlockOffsets(block, 8 * t), p, chunk, t, rows, zeros);
      float out[4][4];
      outputs.Take(block, out);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) {
        float& x = out[i / 4][i % 4];
        x *= factor[i % 4 / 2];
        if (side.TokenOffset() || side.BlockOffset()) x += zeros[i % 4 / 2];
      }
      if constexpr (!Side::kHasNan) {
        Accumulate<false>(side, words, factors, probs, 0, kChunkTokens, lane, out);
      } else if constexpr (Outputs::kUnrolled) {
        if (chunk.whole) {
          Accumulate<false>(side, words, factors, probs, 0, kChunkTokens, lane, out);
        } else {
          AddTokens(layer, side, words, factors, probs, tile, chunk, position, tile.tokens, lane, out);
        }
      } else {
        AddTokens(layer, side, words, factors, probs, tile, chunk, position, chunk.whole ? 1 : tile.tokens, lane, out);
      }
      outputs.Put(block, out);
    }
  }

 private:
  // A token's rows see the same slots. Products are of all rows: where rows see different slots, each token's rows take
  // theirs from products of what they see. `count`: of tokens to tell apart, 1 or the tile's.
  static KVANTA_DEVICE void AddTokens(const AttentionParams& layer, const Side& side,
                                      const typename Operand::Words& words, const uint32_t (&factors)[4],
                                      const ScaledProbs& probs, const QueryTile& tile, const ChunkView& chunk,
                                      int position, int count, int lane, float (&out)[4][4]) {
    for (int token = 0; token < count; ++token) {
      int begin = 0;
      int end = 0;
      VisibleRange(layer, tile.first + token, position, begin, end);
      if (begin >= end) continue;
      float sums[4][4];
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = out[i / 4][i % 4];
      Accumulate<true>(side, words, factors, probs, begin, end, lane, sums);
      KVANTA_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (count == 1 || chunk.token[i % 4 / 2] == token) out[i / 4][i % 4] = sums[i / 4][i % 4];
      }
    }
  }

  static KVANTA_DEVICE bool Sees(const ChunkView& chunk, int row, int token) {
    return token >= chunk.begin[row] && token < chunk.end[row];
  }

  // Tokens' greatest scale, seen by each row: `out`'s exponent follows it, so that weights times scales fit f16.
  static KVANTA_DEVICE void FollowScales(const float (&scales)[8], const ChunkView& chunk, int t, TileRows& rows,
                                         float (&factor)[2]) {
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float largest = 0;
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (Sees(chunk, row, 8 * t + i)) largest = fmaxf(largest, scales[i]);
      }
      largest = fmaxf(largest, ShuffleXor(largest, 1));
      largest = fmaxf(largest, ShuffleXor(largest, 2));
      int exponent = ExponentOf(largest);
      if (exponent > kGreatestExponent) exponent = kGreatestExponent;
      if (exponent <= rows.exponent[row]) continue;
      factor[row] *= PowerOfTwo(rows.exponent[row] - exponent);
      rows.exponent[row] = exponent;
    }
  }

  // P as operands. `scales`: of tokens 8 t to 8 t + 7.
  static KVANTA_DEVICE void ScaleProbs(const float (&p)[4][4], const float (&scales)[8], const ChunkView& chunk, int t,
                                       const TileRows& rows, ScaledProbs& operands) {
    const float units[2] = {PowerOfTwo(kTopExponent - rows.exponent[0]), PowerOfTwo(kTopExponent - rows.exponent[1])};
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        float x[2];
        KVANTA_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = p[j][2 * row + i];
          x[i] = Sees(chunk, row, 8 * t + j + 4 * i) ? x[i] * scales[j + 4 * i] * units[row] : 0.0F;
        }
        const int word = j % 2 * 2 + row;
        uint32_t high = Side::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        operands[j / 2][0].word[word] = high;
        KVANTA_UNROLL
        for (int term = 1; term < Side::kTerms; ++term) {
          x[0] -= std::bit_cast<float>(high << 16U);
          x[1] -= std::bit_cast<float>(high & 0xffff0000U);
          operands[j / 2][term].word[word] = high = PackBf16(x[0], x[1]);
        }
      }
    }
  }

  // What tokens' zeros (fp16, of tokens 8 t to 8 t + 7) add to all channels that share them.
  static KVANTA_DEVICE void ZeroSums(const Vec4& halves, const float (&p)[4][4], const ChunkView& chunk, int t,
                                     const TileRows& rows, float (&sums)[2]) {
    float zeros[8];
    FromHalves(halves, zeros);
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float sum = 0;
      KVANTA_UNROLL
      for (int token = 0; token < 8; ++token) {
        const float zero = Sees(chunk, row, 8 * t + token) ? zeros[token] : 0.0F;
        sum = MultiplyAdd(p[token % 4][2 * row + token / 4], zero, sum);
      }
      sum += ShuffleXor(sum, 1);
      sum += ShuffleXor(sum, 2);
      sums[row] = sum * PowerOfTwo(kTopExponent - rows.exponent[row]);
    }
  }

  // What codes are multiplied by: pairs (token j, token 4 + j). Slots that no row sees may hold NaN.
  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const Side& side, const Cell& cell, const ChunkView& chunk, int head_dim,
                                        int block, int lane, uint32_t (&factors)[4]) {
    const int t = lane % 4;
    const int half = 2 * block + lane / 16;
    if (side.Block() == BlockScale::kE4m3Halves) {
      E4m3ScalePairs(HalfBytes8(cell, head_dim, half, 8 * t), factors);
      if (!chunk.whole) {
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) Mask(factors[j], 8 * t + j, chunk.first, chunk.last);
      }
    }
    if (side.Block() == BlockScale::kPowerHalves) {
      const Vec2 own = HalfBytes8(cell, head_dim, half, 8 * t);
      const Vec2 other = HalfBytes8(cell, head_dim, half ^ 1, 8 * t);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        factors[j] = HalfFactor(ByteOf(own, j), ByteOf(other, j)) |
                     (HalfFactor(ByteOf(own, 4 + j), ByteOf(other, 4 + j)) << 16U);
      }
    }
  }
  // Tokens `token` and 4 more, of which some are outside [begin, end).
  static KVANTA_DEVICE void Mask(uint32_t& pair, int token, int begin, int end) {
    if (token < begin || token >= end) pair &= 0xffff0000U;
    if (token + 4 < begin || token + 4 >= end) pair &= 0x0000ffffU;
  }

  // out += P V of a block of 32 channels. Values of tokens outside [begin, end) are not multiplied.
  template <bool kMasked>
  static KVANTA_DEVICE void Accumulate(const Side& side, const typename Operand::Words& words,
                                       const uint32_t (&factors)[4], const ScaledProbs& probs, int begin, int end,
                                       int lane, float (&out)[4][4]) {
    const bool halves = side.Block() == BlockScale::kE4m3Halves || side.Block() == BlockScale::kPowerHalves;
    const auto channel = [&](auto index) {
      constexpr int kChannel = decltype(index)::value;
      KVANTA_UNROLL
      for (int part = 0; part < Side::kCodeTerms; ++part) {
        uint32_t pairs[4];
        Operand::template Pairs<kChannel>(side, words, lane / 4, part, pairs);
        KVANTA_UNROLL
        for (int j = 0; j < 4; ++j) {
          if (halves) pairs[j] = MultiplyF16(pairs[j], factors[j]);
          if constexpr (kMasked) Mask(pairs[j], 8 * (lane % 4) + j, begin, end);
        }
        KVANTA_UNROLL
        for (int step = 0; step < 2; ++step) {
          KVANTA_UNROLL
          for (int term = 0; term + part < Side::kTerms; ++term) {
            Mma<Side::kBf16>(out[kChannel], probs[step][term], pairs[2 * step], pairs[2 * step + 1]);
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
