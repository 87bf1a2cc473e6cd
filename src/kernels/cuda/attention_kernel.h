// Attention of a tile of query rows to a run of cached pages, for one pair of formats and one head_dim, in pages as
// they are stored. Decode and prefill are the same code. A unit that includes this has included the primitives.
//
// A block attends one tile to one run of 1,024 tokens at absolute positions, each of its four warps to a quarter, chunk
// by chunk of 32 tokens: S = Q K^T by tensor cores, an online softmax in f32, O += P V by tensor cores in f32. Query
// rows lie on M, tokens and then channels on N: what Q K^T leaves in a lane is what P V wants there. Quarters are
// merged in ascending order, runs by another launch. A row's operations depend on its position alone: not on the tile
// it came with, not on the batch.
#pragma once

#include "kernels/cuda/attention_parts.h"

namespace kvanta::kernels::cuda {

template <class Keys, class Values, int kDim>
struct ChunkAttention {
  using KeyOperand = CodeOperand<Keys::kCode>;
  using ValueOperand = CodeOperand<Values::kCode>;
  using Steps = KeySteps<Keys::kCode, kDim>;
  using State = TileState<kDim>;

  // s[j]: tokens 8 t + j (rows g, g + 8 in elements 0, 2) and 8 t + 4 + j (1, 3); without scales but those of blocks.
  static KVANTA_DEVICE void Scores(const AttendLayer& layer, const CellPlace& place, const ChunkView& chunk,
                                   int queries, int lane, float (&s)[4][4]) {
    constexpr int kRowBytes = kDim * KeyOperand::kBits / 8;
    constexpr int kBatch = 4;  // loads in flight
    constexpr int kPairs = KeyOperand::kRegisters;
    const int g = lane / 4;
    const int t = lane % 4;
    const uint8_t* line = chunk.keys + place.codes + (chunk.slot / 16 + g / 4) * (16 * kRowBytes) + g % 4 * 16;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) s[j][i] = 0;
    }
    KVANTA_UNROLL
    for (int first = 0; first < Steps::kLoads; first += kBatch) {
      Words4 units[kBatch];
      KVANTA_UNROLL
      for (int n = 0; n < kBatch; ++n) {
        const int unit = 4 * (first + n) + t;
        units[n] = first + n < Steps::kLoads && unit < Steps::kUnits ? LoadWords4(line + unit * 64) : Words4{};
      }
      KVANTA_UNROLL
      for (int n = 0; n < kBatch; n += kPairs == 1 ? 2 : 1) {
        if (first + n >= Steps::kLoads) break;
        const int load = first + n;
        uint32_t scales[4] = {};
        if constexpr (Keys::kScale == ScaleUse::kBlock16) {
          const int unit = 4 * load + t < Steps::kUnits ? 4 * load + t : 0;
          const int block = unit * KeyOperand::kPanelChannels / 16;
          TokenScales(LoadWord(chunk.keys + place.block_scales + block * layer.page_size + chunk.slot + 4 * g), scales);
        }
        float dots[4][4] = {};
        auto& sums = Keys::kScale == ScaleUse::kBlock32 ? dots : s;
        KVANTA_UNROLL
        for (int step = 0; step < (kPairs == 1 ? 1 : kPairs / 2); ++step) {
          const int index = load * kPairs / 2 + step;
          KVANTA_UNROLL
          for (int term = 0; term < KeyOperand::kTerms; ++term) {
            const Words4 q = LoadShared<Words4>(queries + Steps::At(term, index, lane));
            KVANTA_UNROLL
            for (int j = 0; j < 4; ++j) {
              uint32_t b0 = 0;
              uint32_t b1 = 0;
              if constexpr (kPairs == 1) {
                b0 = units[n].word[j];
                b1 = units[n + 1].word[j];
              } else {
                KeyPairs(units[n].word[j], step, b0, b1);
              }
              if constexpr (Keys::kScale == ScaleUse::kBlock16) {
                b0 = MultiplyF16(b0, scales[j]);
                b1 = MultiplyF16(b1, scales[j]);
              }
              Mma<KeyOperand::kBf16>(sums[j], q, b0, b1);
            }
          }
        }
        if constexpr (Keys::kScale == ScaleUse::kBlock32) {
          float block_scales[8];  // of tokens 8 t to 8 t + 7; a load is 32 channels
          LoadHalves(chunk.keys + place.block_scales + (load * layer.page_size + chunk.slot + 8 * t) * 2, block_scales);
          KVANTA_UNROLL
          for (int j = 0; j < 4; ++j) {
            KVANTA_UNROLL
            for (int i = 0; i < 4; ++i) s[j][i] = MultiplyAdd(dots[j][i], block_scales[j + i % 2 * 4], s[j][i]);
          }
        }
      }
    }
  }

  // Logits in powers of 2, minus infinity where a row does not see a token.
  static KVANTA_DEVICE void Logits(const AttendLayer& layer, const CellPlace& place, const ChunkView& chunk,
                                   const float (&row_scale)[2], const float (&bias)[2], int t, float (&s)[4][4]) {
    float token_scales[8];
    if constexpr (Keys::kScale == ScaleUse::kToken) {
      LoadHalves(chunk.keys + place.token_scales + (chunk.slot + 8 * t) * 2, token_scales);
    }
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = 8 * t + j + i % 2 * 4;
        float logit = s[j][i] * row_scale[i / 2];
        if constexpr (Keys::kScale == ScaleUse::kToken) logit *= token_scales[j + i % 2 * 4];
        if (layer.softcap > 0) {
          logit = layer.softcap * Tanh((logit + bias[i / 2]) / layer.softcap) * kLog2E;
        }
        s[j][i] = token >= chunk.begin[i / 2] && token < chunk.end[i / 2] ? logit : kMinusInfinity;
      }
    }
  }

  // Weights of the tokens, and the state brought to their peak. `factor` is what `out` has to be multiplied by.
  static KVANTA_DEVICE void Softmax(float (&s)[4][4], State& state, float (&factor)[2]) {
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float peak = state.peak[row];
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) peak = fmaxf(peak, fmaxf(s[j][2 * row], s[j][2 * row + 1]));
      peak = fmaxf(peak, ShuffleXor(peak, 1));
      peak = fmaxf(peak, ShuffleXor(peak, 2));
      const float base = peak == kMinusInfinity ? 0.0F : peak;
      factor[row] = Exp2(state.peak[row] - base);
      state.peak[row] = peak;
      float sum = 0;
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        KVANTA_UNROLL
        for (int i = 2 * row; i < 2 * row + 2; ++i) {
          s[j][i] = Exp2(s[j][i] - base);
          sum += s[j][i];
        }
      }
      state.sum[row] = MultiplyAdd(state.sum[row], factor[row], sum);
    }
  }

  // Tokens' greatest scale, seen by each row: `out`'s exponent follows it, so that weights times scales fit f16.
  static KVANTA_DEVICE void FollowScales(const float (&scales)[8], const ChunkView& chunk, int t, State& state,
                                         float (&factor)[2]) {
    KVANTA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float largest = 0;
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) {
        if (8 * t + i >= chunk.begin[row] && 8 * t + i < chunk.end[row]) largest = fmaxf(largest, scales[i]);
      }
      largest = fmaxf(largest, ShuffleXor(largest, 1));
      largest = fmaxf(largest, ShuffleXor(largest, 2));
      int exponent = ExponentOf(largest);
      if (exponent > 16) exponent = 16;
      if (exponent <= state.exponent[row]) continue;
      factor[row] *= PowerOfTwo(state.exponent[row] - exponent);
      state.exponent[row] = exponent;
    }
  }

  // P as operands: two steps of 16 tokens. `scales`: of tokens 8 t .. 8 t + 7.
  static KVANTA_DEVICE void Weights(const float (&p)[4][4], const float (&scales)[8], const ChunkView& chunk, int t,
                                    const State& state, Words4 (&operands)[2][ValueOperand::kTerms]) {
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int row = 0; row < 2; ++row) {
        float x[2];
        KVANTA_UNROLL
        for (int i = 0; i < 2; ++i) {
          const int token = 8 * t + j + 4 * i;
          const bool seen = token >= chunk.begin[row] && token < chunk.end[row];
          x[i] = p[j][2 * row + i];
          x[i] = seen ? x[i] * scales[j + 4 * i] * PowerOfTwo(kTopExponent - state.exponent[row]) : 0.0F;
        }
        const int word = j % 2 * 2 + row;
        const uint32_t high = ValueOperand::kBf16 ? PackBf16(x[0], x[1]) : PackF16(x[0], x[1]);
        operands[j / 2][0].word[word] = high;
        if constexpr (ValueOperand::kTerms == 2) {
          operands[j / 2][1].word[word] =
              PackBf16(x[0] - std::bit_cast<float>(high << 16U), x[1] - std::bit_cast<float>(high & 0xffff0000U));
        }
      }
    }
  }

  // out += P V for block `block` of 32 channels. Values of tokens outside [begin, end) are not multiplied.
  template <bool kMasked>
  static KVANTA_DEVICE void Accumulate(const typename ValueOperand::Loaded& loaded, const uint32_t (&scales)[4],
                                       const Words4 (&weights)[2][ValueOperand::kTerms], int begin, int end, int t,
                                       float (*out)[4]) {
    const auto channel = [&](auto index) {
      constexpr int kChannel = decltype(index)::value;
      uint32_t pairs[4];
      ValueOperand::template ValuePairs<kChannel>(loaded, pairs);
      KVANTA_UNROLL
      for (int j = 0; j < 4; ++j) {
        if constexpr (Values::kScale == ScaleUse::kBlock16) pairs[j] = MultiplyF16(pairs[j], scales[j]);
        if constexpr (kMasked) {
          const int token = 8 * t + j;
          if (token < begin || token >= end) pairs[j] &= 0xffff0000U;
          if (token + 4 < begin || token + 4 >= end) pairs[j] &= 0x0000ffffU;
        }
      }
      KVANTA_UNROLL
      for (int step = 0; step < 2; ++step) {
        KVANTA_UNROLL
        for (int term = 0; term < ValueOperand::kTerms; ++term) {
          Mma<ValueOperand::kBf16>(out[kChannel], weights[step][term], pairs[2 * step], pairs[2 * step + 1]);
        }
      }
    };
    channel(std::integral_constant<int, 0>{});
    channel(std::integral_constant<int, 1>{});
    channel(std::integral_constant<int, 2>{});
    channel(std::integral_constant<int, 3>{});
  }

  // 4 E4M3 scales as f16, each twice, times 2^7.
  static KVANTA_DEVICE void TokenScales(uint32_t bytes, uint32_t (&scales)[4]) {
    const uint32_t low = MultiplyF16(E4m3Pair(bytes), kTwoToThe7);
    const uint32_t high = MultiplyF16(E4m3Pair(bytes >> 16U), kTwoToThe7);
    scales[0] = PermuteBytes(low, 0, 0x1010);
    scales[1] = PermuteBytes(low, 0, 0x3232);
    scales[2] = PermuteBytes(high, 0, 0x1010);
    scales[3] = PermuteBytes(high, 0, 0x3232);
  }

  static KVANTA_DEVICE void KeyPairs(uint32_t unit, int step, uint32_t& b0, uint32_t& b1) {
    if constexpr (KeyOperand::kRegisters == 4) {
      b0 = step == 0 ? KeyOperand::template KeyPair<0>(unit) : KeyOperand::template KeyPair<2>(unit);
      b1 = step == 0 ? KeyOperand::template KeyPair<1>(unit) : KeyOperand::template KeyPair<3>(unit);
    } else {
      b0 = KeyOperand::template KeyPair<0>(unit);
      b1 = KeyOperand::template KeyPair<1>(unit);
    }
  }

  static KVANTA_DEVICE typename ValueOperand::Loaded LoadValues(const CellPlace& place, const ChunkView& chunk,
                                                                int block, int lane) {
    constexpr int kLineBytes = kDim * ValueOperand::kBits * ValueOperand::kTokens / 8;  // of a unit's tokens
    const int channel = 32 * block + lane / 4 * 4;
    typename ValueOperand::Loaded loaded = {};
    if (channel >= kDim) return loaded;
    const uint8_t* from = chunk.values + place.codes +
                          (chunk.slot + lane % 4 * 8) / ValueOperand::kTokens * kLineBytes +
                          channel * ValueOperand::kBits * ValueOperand::kTokens / 8;
    KVANTA_UNROLL
    for (int i = 0; i < ValueOperand::kLoads; ++i) {
      if constexpr (ValueOperand::kLoadWords == 4) {
        const Words4 words = LoadWords4(from + i * kLineBytes);
        KVANTA_UNROLL
        for (int word = 0; word < 4; ++word) loaded.word[i][word] = words.word[word];
      } else {
        const Words2 words = LoadWords2(from + i * kLineBytes);
        KVANTA_UNROLL
        for (int word = 0; word < 2; ++word) loaded.word[i][word] = words.word[word];
      }
    }
    return loaded;
  }

  static KVANTA_DEVICE void Attend(const AttendLayer& layer, const CellPlace& key_place, const CellPlace& value_place,
                                   const QueryTile& tile, const ChunkView& chunk, int64_t position, int queries,
                                   const float (&row_scale)[2], const float (&bias)[2], float value_scale, int lane,
                                   State& state) {
    const int t = lane % 4;
    float s[4][4];
    Scores(layer, key_place, chunk, queries, lane, s);
    Logits(layer, key_place, chunk, row_scale, bias, t, s);
    float factor[2];
    Softmax(s, state, factor);

    // Of fp16 scales, those of the tokens, or of the tokens' blocks; else the static one.
    constexpr bool kBlocks = Values::kScale == ScaleUse::kBlock32;
    constexpr bool kTokens = Values::kScale == ScaleUse::kToken;
    float scales[kBlocks ? State::kBlocks : 1][8] = {};
    if constexpr (kBlocks || kTokens) {
      float largest[8] = {};
      KVANTA_UNROLL
      for (int block = 0; block < (kBlocks ? State::kBlocks : 1); ++block) {
        LoadHalves(chunk.values + (kBlocks ? value_place.block_scales : value_place.token_scales) +
                       (block * layer.page_size + chunk.slot + 8 * t) * 2,
                   scales[block]);
        KVANTA_UNROLL
        for (int i = 0; i < 8; ++i) largest[i] = fmaxf(largest[i], fabsf(scales[block][i]));
      }
      FollowScales(largest, chunk, t, state, factor);
    } else {
      KVANTA_UNROLL
      for (int i = 0; i < 8; ++i) scales[0][i] = value_scale;
      if constexpr (!ValueOperand::kBf16) FollowScales(scales[0], chunk, t, state, factor);
    }
    KVANTA_UNROLL
    for (int i = 0; i < 4 * State::kBlocks; ++i) {
      KVANTA_UNROLL
      for (int e = 0; e < 4; ++e) state.out[i][e] *= factor[e / 2];
    }
    // A token's rows see the same slots. Products are of all rows: where rows see different slots, each token's rows
    // take theirs from products of what they see.
    Words4 weights[2][ValueOperand::kTerms];
    if constexpr (!kBlocks) Weights(s, scales[0], chunk, t, state, weights);
    KVANTA_UNROLL
    for (int block = 0; block < State::kBlocks; ++block) {
      const typename ValueOperand::Loaded loaded = LoadValues(value_place, chunk, block, lane);
      uint32_t block_scales[4] = {};
      if constexpr (Values::kScale == ScaleUse::kBlock16) {
        const int group = 2 * block + lane / 16 < kDim / 16 ? 2 * block + lane / 16 : 0;
        const Words2 bytes =
            LoadWords2(chunk.values + value_place.block_scales + group * layer.page_size + chunk.slot + 8 * t);
        PairScales(bytes, block_scales);
      }
      if constexpr (kBlocks) Weights(s, scales[block], chunk, t, state, weights);
      float(*out)[4] = state.out + 4 * block;
      if (chunk.whole) {
        Accumulate<false>(loaded, block_scales, weights, 0, kChunkTokens, t, out);
        continue;
      }
      for (int token = 0; token < tile.tokens; ++token) {
        int begin = 0;
        int end = 0;
        Seen(layer, tile.first + token, position, begin, end);
        if (begin >= end) continue;
        float sums[4][4];
        KVANTA_UNROLL
        for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] = out[i / 4][i % 4];
        Accumulate<true>(loaded, block_scales, weights, begin, end, t, sums);
        KVANTA_UNROLL
        for (int i = 0; i < 16; ++i) {
          const int row = lane / 4 + i % 4 / 2 * 8;
          if (row / tile.heads == token) out[i / 4][i % 4] = sums[i / 4][i % 4];
        }
      }
    }
  }

  // Slots of the chunk at `position` that a query at `query` sees.
  static KVANTA_DEVICE void Seen(const AttendLayer& layer, int64_t query, int64_t position, int& begin, int& end) {
    const int64_t first = layer.sliding_window > 0 ? query - layer.sliding_window + 1 - position : 0;
    const int64_t last = query + 1 - position;
    begin = static_cast<int>(first < 0 ? 0 : first > kChunkTokens ? kChunkTokens : first);
    end = static_cast<int>(last < 0 ? 0 : last > kChunkTokens ? kChunkTokens : last);
  }

 private:
  // 8 E4M3 scales as pairs (token j, token 4 + j) of f16, times 2^7.
  static KVANTA_DEVICE void PairScales(const Words2& bytes, uint32_t (&scales)[4]) {
    const uint32_t low = PermuteBytes(bytes.word[0], bytes.word[1], 0x5140);
    const uint32_t high = PermuteBytes(bytes.word[0], bytes.word[1], 0x7362);
    scales[0] = MultiplyF16(E4m3Pair(low), kTwoToThe7);
    scales[1] = MultiplyF16(E4m3Pair(low >> 16U), kTwoToThe7);
    scales[2] = MultiplyF16(E4m3Pair(high), kTwoToThe7);
    scales[3] = MultiplyF16(E4m3Pair(high >> 16U), kTwoToThe7);
  }
};

}  // namespace kvanta::kernels::cuda
