// Logits of a tile and a chunk: Q K^T, scales, softcap and mask, for one key type. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/queries.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// Scales of rows g and g + 8.
struct RowScales {
  float row[2];     // factor of the dots
  float offset[2];  // logit of a token offset of 1
};

// Scaled dots to logits in powers of 2; minus infinity for tokens that a row does not see. bias: of rows g and g + 8,
// which cancels but for a softcap or beside a sink.
KVANTA_DEVICE void ToLogits(const AttentionParams& params, const ChunkView& chunk, const float (&bias)[2], int t,
                            float (&s)[4][4]) {
  KVANTA_UNROLL
  for (int j = 0; j < 4; ++j) {
    KVANTA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (params.softcap > 0) {
        s[j][i] = params.softcap * Tanh((s[j][i] + bias[i / 2]) / params.softcap) * kLog2E;
      } else if (params.sinks != nullptr) {
        s[j][i] += bias[i / 2] * kLog2E;
      }
      const int token = 8 * t + j + i % 2 * 4;
      if (token < chunk.begin[i / 2] || token >= chunk.end[i / 2]) s[j][i] = kMinusInfinity;
    }
  }
}

// kMaxBlocks: maximum number of 32-channel blocks of a head. kUnrolled: the exact number.
template <class KvType, int kMaxBlocks, bool kUnrolled>
struct KeyScores {
  using Operand = KeyOperand<KvType>;
  using Raw = typename Operand::Raw;

  // s[j]: tokens 8 t + j (rows g, g + 8 in elements 0, 2) and 8 t + 4 + j (elements 1, 3), with block and channel
  // scales applied.
  template <class Cell>
  static KVANTA_DEVICE void Scores(const KvType& type, const Cell& cell, int head_dim, int queries, int lane,
                                   float (&s)[4][4]) {
    // Blocks whose loads are in flight together.
    constexpr int kPreferredBlocks = Cell::kIsStaged        ? 1
                                     : Operand::kLoads == 1 ? 2
                                     : Operand::kLoads > 4  ? 1
                                                            : 4 / Operand::kLoads;
    constexpr int kBlocksInFlight = kMaxBlocks < kPreferredBlocks ? kMaxBlocks : kPreferredBlocks;
    const int g = lane / 4;
    const int t = lane % 4;
    const int bits = KvType::kSubbyte ? type.LowBits() + type.HighBits() : KvType::kBits;
    const int lane_line = cell.WrapToken(4 * g) / 16 * (2 * head_dim * bits) + g % 4 * 16;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = 0;
    }
    KVANTA_UNROLL_BY(1)
    for (int first = 0; first < kMaxBlocks; first += kBlocksInFlight) {
      if (32 * first >= head_dim) break;
      Raw raw[kBlocksInFlight];
      KVANTA_UNROLL
      for (int n = 0; n < kBlocksInFlight; ++n) Operand::Load(type, cell, head_dim, first + n, t, lane_line, raw[n]);
      KVANTA_UNROLL
      for (int n = 0; n < kBlocksInFlight; ++n) {
        if (32 * (first + n) < head_dim) Block(type, cell, raw[n], head_dim, first + n, queries, lane, s);
      }
    }
  }

  // Multiplies the dots by row and token scales.
  template <class Cell>
  static KVANTA_DEVICE void Scale(const KvType& type, const Cell& cell, const RowScales& rows, int t,
                                  float (&s)[4][4]) {
    const bool has_scales = type.TokenScaling() != formats::ScaleType::kNone;
    float scales[8];
    float offsets[8];
    if (has_scales) TokenScales(type, cell, t, scales);
    if (type.HasTokenOffset()) F16ToFloats(cell.TokenOffsets(8 * t), offsets);
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = j + i % 2 * 4;
        float logit = s[j][i] * rows.row[i / 2];
        if (has_scales) logit *= scales[token];
        if (type.HasTokenOffset()) logit = MultiplyAdd(offsets[token], rows.offset[i / 2], logit);
        s[j][i] = logit;
      }
    }
  }

 private:
  // Factors folded into a block's key operands.
  struct Factors {
    uint32_t tokens[4];              // of token 4 g + j, in both halves
    uint32_t scales[4], offsets[4];  // of channel pairs
  };

  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const KvType& type, const Cell& cell, int head_dim, int block, int lane,
                                        Factors& factors) {
    const int g = lane / 4;
    const int t = lane % 4;
    if (type.BlockScaling() == BlockScale::kE4m3Halves) {
      const int half = 2 * block + t / 2;
      const uint32_t bytes = 16 * half < head_dim ? cell.BlockBytes4(half, 4 * g) : 0;
      const uint32_t low = MultiplyF16(E4m3Pair(bytes), kF16Pair128);
      const uint32_t high = MultiplyF16(E4m3Pair(bytes >> 16U), kF16Pair128);
      factors.tokens[0] = PermuteBytes(low, 0, 0x1010);
      factors.tokens[1] = PermuteBytes(low, 0, 0x3232);
      factors.tokens[2] = PermuteBytes(high, 0, 0x1010);
      factors.tokens[3] = PermuteBytes(high, 0, 0x3232);
    }
    if (type.BlockScaling() == BlockScale::kPowerHalves) {
      const auto bytes = [&](int half) { return 16 * half < head_dim ? cell.BlockBytes4(half, 4 * g) : 0; };
      const uint32_t own = bytes(2 * block + t / 2);
      const uint32_t other = bytes(2 * block + 1 - t / 2);
      KVANTA_UNROLL
      for (unsigned j = 0; j < 4; ++j) {
        factors.tokens[j] = HalfFactor((own >> (8 * j)) & 0xffU, (other >> (8 * j)) & 0xffU) * 0x00010001U;
      }
    }
    if (type.HasChannelScales()) {
      const int channel = 32 * block + 8 * t;
      const bool inside = channel < head_dim;
      const auto pairs = [](const Vec4& vec, uint32_t(&to)[4]) {  // channels i and 4 + i
        to[0] = MultiplyF16(PermuteBytes(vec.word[0], vec.word[2], 0x5410), kF16PairHalf);
        to[1] = MultiplyF16(PermuteBytes(vec.word[0], vec.word[2], 0x7632), kF16PairHalf);
        to[2] = MultiplyF16(PermuteBytes(vec.word[1], vec.word[3], 0x5410), kF16PairHalf);
        to[3] = MultiplyF16(PermuteBytes(vec.word[1], vec.word[3], 0x7632), kF16PairHalf);
      };
      pairs(inside ? cell.ChannelScales(head_dim, channel) : Vec4{}, factors.scales);
      pairs(inside ? cell.ChannelOffsets(head_dim, channel) : Vec4{}, factors.offsets);
    }
  }

  template <class Cell>
  static KVANTA_DEVICE void Block(const KvType& type, const Cell& cell, const Raw& raw, int head_dim, int block,
                                  int queries, int lane, float (&s)[4][4]) {
    const int t = lane % 4;
    Factors factors;
    LoadFactors(type, cell, head_dim, block, lane, factors);
    float dots[4][4] = {};
    const bool scaled = ScalesBlocks(type);
    auto& sums = KvType::kFixed && !scaled ? s : dots;
    const auto pair = [&](auto index, int j, int code_term) {
      constexpr int kPair = decltype(index)::value;
      uint32_t b = Operand::template Pair<kPair>(type, raw, j, t, code_term);
      if (type.BlockScaling() == BlockScale::kE4m3Halves || type.BlockScaling() == BlockScale::kPowerHalves) {
        b = MultiplyF16(b, factors.tokens[j]);
      }
      if (type.HasChannelScales()) b = MultiplyAddF16(b, factors.scales[kPair], factors.offsets[kPair]);
      return b;
    };
    const auto step = [&](auto index) {
      constexpr int kStep = decltype(index)::value;
      Vec4 q[KvType::kTerms];
      KVANTA_UNROLL
      for (int term = 0; term < KvType::kTerms; ++term) {
        q[term] = LoadShared<Vec4>(queries + QueryAt(term, 2 * block + kStep, head_dim, lane));
      }
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        KVANTA_UNROLL
        for (int code_term = 0; code_term < KvType::kCodeTerms; ++code_term) {
          const uint32_t b0 = pair(std::integral_constant<int, 2 * kStep>{}, j, code_term);
          const uint32_t b1 = pair(std::integral_constant<int, 2 * kStep + 1>{}, j, code_term);
          KVANTA_UNROLL
          for (int term = 0; term + code_term < KvType::kTerms; ++term) Mma<KvType::kBf16>(sums[j], q[term], b0, b1);
        }
      }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
    if (KvType::kFixed && !scaled) return;
    float scales[8];
    BlockScales(type, cell, head_dim, block, t, scales);
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = MultiplyAdd(dots[j][i], scales[j + i % 2 * 4], s[j][i]);
    }
  }
};

// Adds the dots of K's unquantized channels. `scales`: of rows g and g + 8.
template <class KvType, int kMaxBlocks>
KVANTA_DEVICE void AddUnquantized(const AttentionParams& params, const KvType& type, const QueryTile& tile,
                                  const ChunkLocation& location, int queries, const float (&scales)[2], int lane,
                                  float (&s)[4][4]) {
  const CellOffsets& offsets = location.exact ? params.exact_unquantized : params.unquantized;
  const PageCell cell(location.record + offsets.Cell(tile.kv_head), offsets, CodeBytes(type, params.unquantized_dim),
                      params.page_size, location.token);
  float dots[4][4];
  KeyScores<KvType, kMaxBlocks, false>::Scores(type, cell, params.unquantized_dim, queries, lane, dots);
  KVANTA_UNROLL
  for (int i = 0; i < 16; ++i) s[i / 4][i % 4] = MultiplyAdd(dots[i / 4][i % 4], scales[i % 4 / 2], s[i / 4][i % 4]);
}

}  // namespace kvanta::kernels::cuda
