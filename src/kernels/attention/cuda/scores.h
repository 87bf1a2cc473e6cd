// Q K^T of a tile and a chunk, and its logits, for one side. A unit that includes this has included the primitives.
#pragma once

#include "kernels/attention/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

// Of rows g and g + 8: what dots are multiplied by, and the logit of a zero of 1.
struct RowScales {
  float row[2];
  float zero[2];
};

// Scaled dots to logits in powers of 2, minus infinity where a row does not see a token. bias: of rows g and g + 8,
// added before a softcap.
KVANTA_DEVICE void Logits(const AttentionParams& layer, const ChunkView& chunk, const float (&bias)[2], int t,
                          float (&s)[4][4]) {
  KVANTA_UNROLL
  for (int j = 0; j < 4; ++j) {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (layer.softcap > 0) {
        s[j][i] = layer.softcap * Tanh((s[j][i] + bias[i / 2]) / layer.softcap) * kLog2E;
      }
      const int token = 8 * t + j + i % 2 * 4;
      if (token < chunk.begin[i / 2] || token >= chunk.end[i / 2]) s[j][i] = kMinusInfinity;
    }
  }
}

// kMaxBlocks: of 32 channels that a head has. kUnrolled: it has as many.
template <class Side, int kMaxBlocks, bool kUnrolled>
struct KeyScores {
  using Operand = KeyOperand<Side>;
  using Words = typename Operand::Words;

  // s[j]: tokens 8 t + j (rows g, g + 8 in elements 0, 2) and 8 t + 4 + j (1, 3); without scales but those of blocks
  // and channels.
  template <class Cell>
  static KVANTA_DEVICE void Scores(const Side& side, const Cell& cell, int head_dim, int queries, int lane,
                                   float (&s)[4][4]) {
    // Blocks whose loads fly together.
    constexpr int kRequested = Cell::kIsStaged        ? 1
                               : Operand::kLoads == 1 ? 2
                               : Operand::kLoads > 4  ? 1
                                                      : 4 / Operand::kLoads;
    constexpr int kAhead = kMaxBlocks < kRequested ? kMaxBlocks : kRequested;
    const int g = lane / 4;
    const int t = lane % 4;
    const int bits = Side::kSubbyte ? side.LowBits() + side.HighBits() : Side::kBits;
    const int lane_line = cell.Token(4 * g) / 16 * (2 * head_dim * bits) + g % 4 * 16;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = 0;
    }
    KVANTA_UNROLL_BY(1)
    for (int first = 0; first < kMaxBlocks; first += kAhead) {
      if (32 * first >= head_dim) break;
      Words words[kAhead];
      KVANTA_UNROLL
      for (int n = 0; n < kAhead; ++n) Operand::Load(side, cell, head_dim, first + n, t, lane_line, words[n]);
      KVANTA_UNROLL
      for (int n = 0; n < kAhead; ++n) {
        if (32 * (first + n) < head_dim) Block(side, cell, words[n], head_dim, first + n, queries, lane, s);
      }
    }
  }

  // These dots times their scales.
  template <class Cell>
  static KVANTA_DEVICE void Scale(const Side& side, const Cell& cell, const RowScales& rows, int t, float (&s)[4][4]) {
    const bool has_scales = side.Token() != formats::ScaleType::kNone;
    float scales[8];
    float zeros[8];
    if (has_scales) TokenScales(side, cell, t, scales);
    if (side.TokenOffset()) FromHalves(cell.TokenOffsets(8 * t), zeros);
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = j + i % 2 * 4;
        float logit = s[j][i] * rows.row[i / 2];
        if (has_scales) logit *= scales[token];
        if (side.TokenOffset()) logit = MultiplyAdd(zeros[token], rows.zero[i / 2], logit);
        s[j][i] = logit;
      }
    }
  }

 private:
  // What a block's codes are multiplied by before they meet the query.
  struct Factors {
    uint32_t tokens[4];            // of token 4 g + j, in both halves
    uint32_t scales[4], zeros[4];  // of the pairs of channels
  };

  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const Side& side, const Cell& cell, int head_dim, int block, int lane,
                                        Factors& factors) {
    const int g = lane / 4;
    const int t = lane % 4;
    if (side.Block() == BlockScale::kE4m3Halves) {
      const int half = 2 * block + t / 2;
      const uint32_t bytes = 16 * half < head_dim ? cell.BlockBytes4(half, 4 * g) : 0;
      const uint32_t low = MultiplyF16(E4m3Pair(bytes), kTwoToThe7);
      const uint32_t high = MultiplyF16(E4m3Pair(bytes >> 16U), kTwoToThe7);
      factors.tokens[0] = PermuteBytes(low, 0, 0x1010);
      factors.tokens[1] = PermuteBytes(low, 0, 0x3232);
      factors.tokens[2] = PermuteBytes(high, 0, 0x1010);
      factors.tokens[3] = PermuteBytes(high, 0, 0x3232);
    }
    if (side.Block() == BlockScale::kPowerHalves) {
      const auto bytes = [&](int half) { return 16 * half < head_dim ? cell.BlockBytes4(half, 4 * g) : 0; };
      const uint32_t own = bytes(2 * block + t / 2);
      const uint32_t other = bytes(2 * block + 1 - t / 2);
      KVANTA_UNROLL
      for (unsigned j = 0; j < 4; ++j) {
        factors.tokens[j] = HalfFactor((own >> (8 * j)) & 0xffU, (other >> (8 * j)) & 0xffU) * 0x00010001U;
      }
    }
    if (side.Channel()) {
      const int channel = 32 * block + 8 * t;
      const bool inside = channel < head_dim;
      const auto pairs = [](const Vec4& words, uint32_t(&to)[4]) {  // channels i and 4 + i
        to[0] = MultiplyF16(PermuteBytes(words.word[0], words.word[2], 0x5410), kHalf);
        to[1] = MultiplyF16(PermuteBytes(words.word[0], words.word[2], 0x7632), kHalf);
        to[2] = MultiplyF16(PermuteBytes(words.word[1], words.word[3], 0x5410), kHalf);
        to[3] = MultiplyF16(PermuteBytes(words.word[1], words.word[3], 0x7632), kHalf);
      };
      pairs(inside ? cell.ChannelScales(head_dim, channel) : Vec4{}, factors.scales);
      pairs(inside ? cell.ChannelOffsets(head_dim, channel) : Vec4{}, factors.zeros);
    }
  }

  template <class Cell>
  static KVANTA_DEVICE void Block(const Side& side, const Cell& cell, const Words& words, int head_dim, int block,
                                  int queries, int lane, float (&s)[4][4]) {
    const int t = lane % 4;
    Factors factors;
    LoadFactors(side, cell, head_dim, block, lane, factors);
    float dots[4][4] = {};
    const bool scaled = ScalesBlocks(side);
    auto& sums = Side::kFixed && !scaled ? s : dots;
    const auto pair = [&](auto index, int j, int part) {
      constexpr int kPair = decltype(index)::value;
      uint32_t b = Operand::template Pair<kPair>(side, words, j, t, part);
      if (side.Block() == BlockScale::kE4m3Halves || side.Block() == BlockScale::kPowerHalves) {
        b = MultiplyF16(b, factors.tokens[j]);
      }
      if (side.Channel()) b = MultiplyAddF16(b, factors.scales[kPair], factors.zeros[kPair]);
      return b;
    };
    const auto step = [&](auto index) {
      constexpr int kStep = decltype(index)::value;
      Vec4 q[Side::kTerms];
      KVANTA_UNROLL
      for (int term = 0; term < Side::kTerms; ++term) {
        q[term] = LoadShared<Vec4>(queries + QueryAt(term, 2 * block + kStep, head_dim, lane));
      }
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        KVANTA_UNROLL
        for (int part = 0; part < Side::kCodeTerms; ++part) {
          const uint32_t b0 = pair(std::integral_constant<int, 2 * kStep>{}, j, part);
          const uint32_t b1 = pair(std::integral_constant<int, 2 * kStep + 1>{}, j, part);
          KVANTA_UNROLL
          for (int term = 0; term + part < Side::kTerms; ++term) Mma<Side::kBf16>(sums[j], q[term], b0, b1);
        }
      }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
    if (Side::kFixed && !scaled) return;
    float scales[8];
    BlockScales(side, cell, head_dim, block, t, scales);
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = MultiplyAdd(dots[j][i], scales[j + i % 2 * 4], s[j][i]);
    }
  }
};

// What K's plain channels add to scaled dots; `scales`: of rows g and g + 8. kMaxBlocks: of 32 channels.
template <class Side, int kMaxBlocks>
KVANTA_DEVICE void AddUnquantized(const AttentionParams& layer, const Side& side, const QueryTile& tile,
                                  const Location& at, int queries, const float (&scales)[2], int lane,
                                  float (&s)[4][4]) {
  const CellPlace& place = at.exact ? layer.exact_unquantized : layer.plain;
  const PageCell cell(at.record + place.first + tile.kv_head * place.stride, place,
                      CodeBytes(side, layer.unquantized_dim), layer.page_size, at.slot);
  float dots[4][4];
  KeyScores<Side, kMaxBlocks, false>::Scores(side, cell, layer.unquantized_dim, queries, lane, dots);
  KVANTA_UNROLL
  for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = MultiplyAdd(dots[i / 4][i % 4], scales[i % 4 / 2], s[i / 4][i % 4]);
}

}  // namespace kvanta::kernels::cuda
