// Logits of a tile and a chunk: K Q^T, scales, softcap and mask, for one key type. Include the primitives first.
#pragma once

#include "kernels/attention/cuda/chunks.h"
#include "kernels/attention/cuda/page_cell.h"
#include "kernels/attention/cuda/queries.h"
#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// Scales of a lane's rows.
template <int kRowTiles>
struct RowScales {
  RowValues<kRowTiles> row;     // factor of the dots
  RowValues<kRowTiles> offset;  // logit of a token offset of 1
};

// A scaled dot to a logit in powers of 2, where it is not one already. bias: of the row; it cancels except with a
// softcap or a sink.
KVANTA_DEVICE bool NeedsLogits(const AttentionParams& params) {
  return params.softcap > 0 || params.sinks != nullptr;
}
KVANTA_DEVICE float ToLogit(const AttentionParams& params, float bias, float x) {
  return params.softcap > 0 ? params.softcap * Tanh((x + bias) / params.softcap) * kLog2E : x + bias * kLog2E;
}
template <int kRowTiles>
KVANTA_DEVICE void ToLogits(const AttentionParams& params, const RowValues<kRowTiles>& bias,
                            RowFragments<kRowTiles>& s) {
  if (!NeedsLogits(params)) return;
  ForRows<kRowTiles>([&](int tile, int q) {
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float& x = s[tile][j / 2][j % 2 * 2 + q];
      x = ToLogit(params, bias[tile][q], x);
    }
  });
}

// Minus infinity for tokens that a row does not see.
template <int kRowTiles>
KVANTA_DEVICE void MaskLogits(const ChunkView<kRowTiles>& chunk, int g, RowFragments<kRowTiles>& s) {
  ForRows<kRowTiles>([&](int tile, int q) {
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int token = 4 * g + j;
      if (token < chunk.begin[tile][q] || token >= chunk.end[tile][q]) s[tile][j / 2][j % 2 * 2 + q] = kMinusInfinity;
    }
  });
}

// kMaxBlocks: maximum number of 32-channel blocks of a head. kUnrolled: their loop may be unrolled.
template <class KvType, int kRowTiles, int kMaxBlocks, bool kUnrolled>
struct KeyScores {
  using Operand = KeyOperand<KvType>;
  using Raw = typename Operand::Raw;
  using Fragments = RowFragments<kRowTiles>;
  static constexpr int kShared = BlocksPerScale<KvType>();

  // Dots of the chunk's tokens, with block and channel scales applied. queries: those that QueryRows::Pack stored at an
  // offset, or QueryRowAddresses.
  template <class Cell, class Queries>
  static KVANTA_DEVICE void Scores(const KvType& type, const Cell& cell, int head_dim, const Queries& queries, int lane,
                                   Fragments& s) {
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) s[i / 8][i / 4 % 2][i % 4] = 0;
    Fragments dots = {};  // of blocks that share a scale
    if constexpr (Cell::kIsDecoded) {
      KVANTA_UNROLL_BY(kMaxBlocks)
      for (int block = 0; block < kMaxBlocks; ++block) {
        const auto operand = [&](auto step, int i, int /*code_term*/) {
          return cell.Operand(block, 2 * decltype(step)::value + i, lane);
        };
        Products(type, cell, operand, head_dim, block, queries, lane, dots, s);
      }
    } else {
      // Blocks whose loads are in flight together.
      constexpr int kPreferredBlocks = Cell::kIsStaged || kRowTiles > 2 ? 1
                                       : Operand::kLoads == 1           ? 2
                                       : Operand::kLoads > 4            ? 1
                                                                        : 4 / Operand::kLoads;
      constexpr int kBlocksInFlight = kMaxBlocks < kPreferredBlocks ? kMaxBlocks : kPreferredBlocks;
      const int t = lane % 4;
      const int lane_line = LaneLine(type, cell, head_dim, lane);
      [[maybe_unused]] constexpr int kUnroll = kShared > kBlocksInFlight ? kShared / kBlocksInFlight : 1;
      KVANTA_UNROLL_BY(kUnrolled && (Cell::kIsStaged || kMaxBlocks <= 2) ? kMaxBlocks : kUnroll)
      for (int first = 0; first < kMaxBlocks; first += kBlocksInFlight) {
        if (32 * first >= head_dim) break;
        Raw raw[kBlocksInFlight];
        KVANTA_UNROLL
        for (int n = 0; n < kBlocksInFlight; ++n) {
          if constexpr (kRowTiles > 2 && KvType::kBits == 16) {
            Operand::template Load<true>(type, cell, head_dim, first + n, t, lane_line, raw[n]);
          } else {
            Operand::Load(type, cell, head_dim, first + n, t, lane_line, raw[n]);
          }
        }
        KVANTA_UNROLL
        for (int n = 0; n < kBlocksInFlight; ++n) {
          const int block = first + n;
          if (32 * block >= head_dim) continue;
          Factors factors;
          LoadFactors(type, cell, head_dim, block, lane, factors);
          const auto operand = [&](auto step, int i, int code_term) {
            return OperandOf<decltype(step)::value>(type, raw[n], factors, i, t, code_term);
          };
          Products(type, cell, operand, head_dim, block, queries, lane, dots, s);
        }
      }
    }
  }

  // Decodes a block to `to`.
  template <class Cell, class Decoded>
  static KVANTA_DEVICE void Decode(const KvType& type, const Cell& cell, int head_dim, int block, int lane,
                                   const Decoded& to) {
    const int t = lane % 4;
    Raw raw;
    Operand::Load(type, cell, head_dim, block, t, LaneLine(type, cell, head_dim, lane), raw);
    Factors factors;
    LoadFactors(type, cell, head_dim, block, lane, factors);
    const auto step = [&](auto index) {
      constexpr int kStep = decltype(index)::value;
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        to.SetOperand(block, 2 * kStep + i, lane, OperandOf<kStep>(type, raw, factors, i, t, 0));
      }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
  }

  // Multiplies the dots by row and token scales.
  template <class Cell>
  static KVANTA_DEVICE void Scale(const KvType& type, const Cell& cell, const RowScales<kRowTiles>& rows, int g,
                                  Fragments& s) {
    const bool has_scales = type.TokenScaling() != formats::ScaleType::kNone;
    float scales[4];
    float offsets[4];
    if (has_scales) TokenScales(type, cell, g, scales);
    if (type.HasTokenOffset()) F16ToFloats(cell.TokenOffsets(4 * g), offsets);
    ForRows<kRowTiles>([&](int tile, int q) {
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float& x = s[tile][j / 2][j % 2 * 2 + q];
        x *= rows.row[tile][q];
        if (has_scales) x *= scales[j];
        if (type.HasTokenOffset()) x = MultiplyAdd(offsets[j], rows.offset[tile][q], x);
      }
    });
  }

 private:
  // Factors folded into a block's key operands.
  struct Factors {
    uint32_t tokens[4];              // values of token 4 g + j, in both halves
    uint32_t scales[4], offsets[4];  // scales and offsets of channel pairs
  };

  template <class Cell>
  static KVANTA_DEVICE void LoadFactors(const KvType& type, const Cell& cell, int head_dim, int block, int lane,
                                        Factors& factors) {
    const int g = lane / 4;
    const int t = lane % 4;
    if (type.BlockScaling() == BlockScale::kE4m3Halves) {
      const uint32_t bytes = HalfBytes4(cell, head_dim, 2 * block + t / 2, 4 * g);
      const uint32_t low = MultiplyF16(E4m3Pair(bytes), kF16Pair128);
      const uint32_t high = MultiplyF16(E4m3Pair(bytes >> 16U), kF16Pair128);
      factors.tokens[0] = PermuteBytes(low, 0, 0x1010);
      factors.tokens[1] = PermuteBytes(low, 0, 0x3232);
      factors.tokens[2] = PermuteBytes(high, 0, 0x1010);
      factors.tokens[3] = PermuteBytes(high, 0, 0x3232);
    }
    if (type.BlockScaling() == BlockScale::kPowerHalves) {
      const uint32_t own = HalfBytes4(cell, head_dim, 2 * block + t / 2, 4 * g);
      const uint32_t other = HalfBytes4(cell, head_dim, 2 * block + 1 - t / 2, 4 * g);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) factors.tokens[j] = HalfFactor(ByteOf(own, j), ByteOf(other, j)) * 0x00010001U;
    }
    if (type.HasChannelScales()) {
      const int channel = 32 * block + 8 * t;
      const bool inside = channel < head_dim;
      ChannelPairs(inside ? cell.ChannelScales(head_dim, channel) : Vec4{}, factors.scales);
      ChannelPairs(inside ? cell.ChannelOffsets(head_dim, channel) : Vec4{}, factors.offsets);
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        factors.scales[i] = MultiplyF16(factors.scales[i], kF16PairHalf);
        factors.offsets[i] = MultiplyF16(factors.offsets[i], kF16PairHalf);
      }
    }
    if (type.HasChannelBits()) {
      const int channel = 32 * block + 8 * t;
      const int scales = SharedLevels::GroupScales(type.levels, head_dim) + 2 * channel;
      ChannelPairs(channel < head_dim ? LoadShared<Vec4>(scales) : Vec4{}, factors.scales);
    }
  }

  // Pairs of 8 channels: i and 4 + i.
  static KVANTA_DEVICE void ChannelPairs(const Vec4& vec, uint32_t (&to)[4]) {
    to[0] = PermuteBytes(vec.word[0], vec.word[2], 0x5410);
    to[1] = PermuteBytes(vec.word[0], vec.word[2], 0x7632);
    to[2] = PermuteBytes(vec.word[1], vec.word[3], 0x5410);
    to[3] = PermuteBytes(vec.word[1], vec.word[3], 0x7632);
  }

  // Offset of the lane's tokens in a unit's line.
  template <class Cell>
  static KVANTA_DEVICE int LaneLine(const KvType& type, const Cell& cell, int head_dim, int lane) {
    const int g = lane / 4;
    const int bits = KvType::kSubbyte ? type.LowBits() + type.HighBits() : KvType::kBits;
    return cell.WrapToken(4 * g) / 16 * (2 * head_dim * bits) + g % 4 * 16;
  }

  // The A operand of tile `i` of tokens and 16 channels; term `code_term` of f32 codes.
  template <int kStep>
  static KVANTA_DEVICE Vec4 OperandOf(const KvType& type, const Raw& raw, const Factors& factors, int i, int t,
                                      int code_term) {
    const auto pair = [&](auto index, int j) {
      constexpr int kPair = decltype(index)::value;
      uint32_t a = Operand::template Pair<kPair>(type, raw, j, t, code_term);
      if (type.BlockScaling() == BlockScale::kE4m3Halves || type.BlockScaling() == BlockScale::kPowerHalves) {
        a = MultiplyF16(a, factors.tokens[j]);
      }
      if (type.HasChannelScales()) a = MultiplyAddF16(a, factors.scales[kPair], factors.offsets[kPair]);
      if (type.HasChannelBits()) a = MultiplyF16(a, factors.scales[kPair]);
      return a;
    };
    constexpr std::integral_constant<int, 2 * kStep> kFirst;
    constexpr std::integral_constant<int, 2 * kStep + 1> kSecond;
    return {{pair(kFirst, 2 * i), pair(kFirst, 2 * i + 1), pair(kSecond, 2 * i), pair(kSecond, 2 * i + 1)}};
  }

  // Adds the dots of a block. operand(step, i, code_term): OperandOf of the block. dots: of the blocks before that
  // share its scale.
  template <class Cell, class BlockOperand, class Queries>
  static KVANTA_DEVICE void Products(const KvType& type, const Cell& cell, BlockOperand operand, int head_dim,
                                     int block, const Queries& queries, int lane, Fragments& dots, Fragments& s) {
    if (block % kShared == 0) {
      KVANTA_UNROLL
      for (int i = 0; i < 8 * kRowTiles; ++i) dots[i / 8][i / 4 % 2][i % 4] = 0;
    }
    const bool scaled = ScalesBlocks(type);
    auto& sums = KvType::kFixed && !scaled ? s : dots;
    Vec4 q[kRowTiles][KvType::kTerms];
    KVANTA_UNROLL
    for (int i = 0; i < kRowTiles * KvType::kTerms; ++i) {
      const int tile = i / KvType::kTerms;
      const int term = i % KvType::kTerms;
      q[tile][term] = LoadQueries<kRowTiles>(queries, term, tile, block, head_dim, lane);
    }
    const auto step = [&](auto index) {
      constexpr int kStep = decltype(index)::value;
      KVANTA_UNROLL
      for (int i = 0; i < 2; ++i) {
        KVANTA_UNROLL
        for (int code_term = 0; code_term < KvType::kCodeTerms; ++code_term) {
          const Vec4 a = operand(index, i, code_term);
          KVANTA_UNROLL
          for (int tile = 0; tile < kRowTiles; ++tile) {
            KVANTA_UNROLL
            for (int term = 0; term + code_term < KvType::kTerms; ++term) {
              Mma<KvType::kBf16>(sums[tile][i], a, q[tile][term].word[2 * kStep], q[tile][term].word[2 * kStep + 1]);
            }
          }
        }
      }
    };
    step(std::integral_constant<int, 0>{});
    step(std::integral_constant<int, 1>{});
    if (KvType::kFixed && !scaled) return;
    if ((block + 1) % kShared != 0 && 32 * (block + 1) < head_dim) return;
    float scales[4];
    BlockScales(type, cell, head_dim, block, lane / 4, scales);
    KVANTA_UNROLL
    for (int i = 0; i < 8 * kRowTiles; ++i) {
      float& sum = s[i / 8][i / 4 % 2][i % 4];
      sum = MultiplyAdd(dots[i / 8][i / 4 % 2][i % 4], scales[i % 8 / 2], sum);
    }
  }
};

// Adds the dots of K's unquantized channels, `count` of them, times scale_of(row tile, q).
template <class KvType, int kRowTiles, int kMaxBlocks, class ScaleOf>
KVANTA_DEVICE void AddUnquantized(const AttentionParams& params, const KvType& type, const QueryTile& tile, int count,
                                  const ChunkLocation& location, int queries, ScaleOf scale_of, int lane,
                                  RowFragments<kRowTiles>& s) {
  const CellOffsets& offsets = location.exact ? params.exact_unquantized : params.unquantized;
  const PageCell cell(location.record + offsets.Cell(tile.kv_head), offsets, CodeBytes(type, count), params.page_size,
                      location.token);
  RowFragments<kRowTiles> dots;
  KeyScores<KvType, kRowTiles, kMaxBlocks, kMaxBlocks <= 2>::Scores(type, cell, count, queries, lane, dots);
  ForRows<kRowTiles>([&](int row_tile, int q) {
    const float scale = scale_of(row_tile, q);
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float& sum = s[row_tile][j / 2][j % 2 * 2 + q];
      sum = MultiplyAdd(dots[row_tile][j / 2][j % 2 * 2 + q], scale, sum);
    }
  });
}

}  // namespace kvanta::kernels::cuda
