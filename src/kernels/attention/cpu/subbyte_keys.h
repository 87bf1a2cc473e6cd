// QK kernels of sub-byte codes (subbyte_codes.h), with scales per block and token or with a scale and an offset per
// channel; included by isa_<isa>.cc after keys.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/keys.h"
#include "kernels/attention/cpu/subbyte_codes.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Constants rather than calls: a function that is not inlined could be shared with other ISA units by the linker.
template <formats::ElementType kElementType>
inline constexpr float kLevelScale = formats::Levels(kElementType).unit;
template <formats::ElementType kElementType>
inline constexpr int kLevelOffset = SubbyteLevelsOf(kElementType).offset;

template <formats::ElementType kElementType>
float PrepareSubbyte(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<SubbyteQuery>(query, head_dim, block, kLevelOffset<kElementType>, out) * kLevelScale<kElementType>;
}

// ---- QK

// Scales and offsets of a page as f32, [blocks][page_tokens], which tiles share; scales are 1 where a cell has none.
struct KeyScales {
  alignas(64) float scale[kMaxBlocks * kMaxPageTokens];
  alignas(64) float offset[kMaxBlocks * kMaxPageTokens];

  KVANTA_INLINE Vec16::F Scale(int slot) const { return Vec16::Load(scale + slot); }
  KVANTA_INLINE Vec16::F Offset(int slot) const { return Vec16::Load(offset + slot); }
};
// The same, converted where they are used: for one tile.
template <formats::ScaleType kType>
struct ScalesInPlace {
  const CellView& cell;

  KVANTA_INLINE Vec16::F Scale(int slot) const { return LoadScalesOf<kType>(cell.block_scales.data, slot); }
  KVANTA_INLINE Vec16::F Offset(int slot) const { return Vec16::LoadFp16(cell.block_offsets + slot); }
};
__attribute__((noinline)) void LoadKeyScales(const CellView& cell, int groups, KeyScales& scales) {
  const int blocks = ScaleBlocks(cell);
  const auto each = [&](auto load) __attribute__((always_inline)) {
    for (int b = 0; b < blocks; ++b) {
      for (int slot = b * cell.page_tokens; slot < b * cell.page_tokens + groups * 16; slot += 16) load(slot);
    }
  };
  DispatchScaleType(
      cell.block_scales, [&](auto type) __attribute__((always_inline)) {
        each([&](int slot) {
          Vec16::Store(scales.scale + slot, LoadScalesOf<decltype(type)::kScale>(cell.block_scales.data, slot));
        });
      });
  if (cell.block_offsets) {
    each([&](int slot) { Vec16::Store(scales.offset + slot, Vec16::LoadFp16(cell.block_offsets + slot)); });
  }
}

// Scores rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes begin at `lines`.
template <class Key, int kGroups, int kRows, class Scales>
KVANTA_INLINE void ScoreSubbyteTile(const KeyPass& pass, const Scales& scales, const uint8_t* lines, int group, int row,
                                    Prefetcher& prefetch) {
  const CellView& cell = pass.cell;
  const int64_t bias_offset = BiasOffset<Key>(cell.head_dim);
  const int block = cell.block_scales ? cell.block : cell.head_dim;
  const int64_t group_bytes = int64_t{cell.head_dim} * Key::kBits * 2;
  const uint8_t* low = lines;
  const uint8_t* high = lines + int64_t{cell.head_dim} * Key::kLow * 2;
  const uint8_t* query[kRows];
  const int32_t* bias[kRows];
  constexpr int kSums = kRows * kGroups;
  Vec16::F sums[kSums];
  for (int r = 0; r < kRows; ++r) {
    query[r] = pass.query + (row + r) * pass.query_stride;
    bias[r] = reinterpret_cast<const int32_t*>(query[r] + bias_offset);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = Vec16::Zero();
  const int32_t zero = 0;
  int block_slot = group * 16;
  for (int first = 0, channel_of_block = 0, b = 0; first < cell.head_dim;) {
    // A block may be summed in parts: integers below 2^24 are exact in f32.
    Bytes16::Sum dots[kSums];
    const int32_t* initial[kRows];
    for (int r = 0; r < kRows; ++r) initial[r] = channel_of_block == 0 ? bias[r] + b : &zero;
    const bool whole = block - channel_of_block >= Key::kBlock;
    if (whole) {
      Key::template Dot<kGroups, kRows, Key::kBlock>(low, high, group_bytes, query, initial, dots, prefetch);
    } else {
      Key::template Dot<kGroups, kRows, Key::kStep>(low, high, group_bytes, query, initial, dots, prefetch);
    }
    const int channels = whole ? Key::kBlock : Key::kStep;
    Vec16::F scale[kGroups];
    for (int g = 0; g < kGroups; ++g) scale[g] = scales.Scale(block_slot + 16 * g);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      sums[i] = Vec16::Fma(Bytes16::ToFloat(dots[i]), scale[i % kGroups], sums[i]);
    }
    for (int r = 0; r < kRows; ++r) query[r] += channels;
    low += channels * Key::kLow * 2;
    high += channels * Key::kHigh * 2;
    first += channels;
    channel_of_block += channels;
    if (channel_of_block == block) {
      channel_of_block = 0;
      ++b;
      block_slot += cell.page_tokens;
    }
  }
  for (int b = 0; cell.block_offsets && b < cell.head_dim / block; ++b) {
    Vec16::F offset[kGroups];
    for (int g = 0; g < kGroups; ++g) offset[g] = scales.Offset(b * cell.page_tokens + (group + g) * 16);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      const Vec16::F total = Vec16::Set1(QuerySums<Key>(pass, row + i / kGroups)[b]);
      sums[i] = Vec16::Fma(total, offset[i % kGroups], sums[i]);
    }
  }
  // Apart and unrolled, so that the sums stay in registers.
  if (cell.token_scales) {
    Vec16::F scale[kGroups];
    for (int g = 0; g < kGroups; ++g) scale[g] = LoadScales(cell.token_scales, (group + g) * 16);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Vec16::Mul(sums[i], scale[i % kGroups]);
  }
  if (cell.token_offsets) {
    Vec16::F offset[kGroups];
    for (int g = 0; g < kGroups; ++g) offset[g] = Vec16::LoadFp16(cell.token_offsets + (group + g) * 16);
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      sums[i] = Vec16::Fma(Vec16::Set1(QuerySums<Key>(pass, row + i / kGroups)[0]), offset[i % kGroups], sums[i]);
    }
  }
  float* scores = pass.scores + row * kMaxPageTokens + group * 16;
  const float* row_scale = pass.row_scale + row;
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    Vec16::Store(scores + i / kGroups * kMaxPageTokens + i % kGroups * 16,
                 Vec16::Mul(sums[i], Vec16::Set1(row_scale[i / kGroups])));
  }
}

template <class Key, int kGroups>
KVANTA_INLINE void ScoreSubbyteGroups(const KeyPass& pass, const KeyScales& scales, const uint8_t* lines, int group,
                                      Prefetcher& prefetch) {
  ForRowTiles<Key>(
      pass.rows, [&]<int kRows>(RowCount<kRows>, int row) __attribute__((always_inline)) {
        ScoreSubbyteTile<Key, kGroups, kRows>(pass, scales, lines, group, row, prefetch);
      });
}

// Scores groups [first, last).
template <class Key>
KVANTA_INLINE void AddScores(const KeyPass& pass, const KeyScales& scales, int first, int last, Prefetcher& prefetch) {
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * Key::kBits * 2;
  int group = first;
  for (; group + kGroupsUnroll <= last; group += kGroupsUnroll) {
    ScoreSubbyteGroups<Key, kGroupsUnroll>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < last) ScoreSubbyteGroups<Key, 1>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
}

// AddScores() of a pass of one tile, of the most common size, with an even number of groups: it needs its scales once,
// and storing them took a tenth of its time.
template <class Key, formats::ScaleType kType>
KVANTA_INLINE void AddTileScores(const KeyPass& pass, Prefetcher& prefetch) {
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * Key::kBits * 2;
  for (int group = 0; group < pass.groups; group += kGroupsUnroll) {
    ScoreSubbyteTile<Key, kGroupsUnroll, kQueryTile>(pass, ScalesInPlace<kType>{pass.cell},
                                                     pass.cell.codes + group * group_bytes, group, 0, prefetch);
  }
}

template <class Key>
void ScoreSubbyte(const KeyPass& pass) {
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, RowTiles<Key>(pass.rows), kGroupsUnroll, Key::kChannelsOfStep)};
  if constexpr (kManyRegisters) {
    constexpr formats::ScaleType kType = Key::kLevelsOfE2M1 ? formats::ScaleType::kE4M3 : formats::ScaleType::kFp16;
    const ScaleSection& scales = pass.cell.block_scales;
    if (pass.rows == kQueryTile && pass.groups % kGroupsUnroll == 0 && scales && scales.type == kType) {
      return AddTileScores<Key, kType>(pass, prefetch);
    }
  }
  KeyScales scales;
  LoadKeyScales(pass.cell, pass.groups, scales);
  AddScores<Key>(pass, scales, 0, pass.groups, prefetch);
}

// ---- keys with a scale and an offset per channel: prepared queries are f32, and are quantized once per token group

inline int64_t ChannelScaledQueryBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);
}

inline float PrepareChannelScaled(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  __builtin_memset(out, 0, static_cast<size_t>(ChannelScaledQueryBytes(head_dim)));
  __builtin_memcpy(out, query, sizeof(float) * static_cast<size_t>(head_dim));
  Vec16::F sum = Vec16::Zero();
  for (int c = 0; c < head_dim; c += 16) sum = Vec16::Add(sum, LoadChannels(query, c, head_dim));
  return 1.0f + 0 * Vec16::Sum(sum);  // NaN and infinities propagate
}

// The scale of 16 channels of a token group and the offset of their middle code, which is multiplied by the unquantized
// query: codes far from the middle would amplify the query's quantization error.
struct ChannelScale {
  Vec16::F scale;
  Vec16::F offset;
};
template <formats::ElementType kElementType>
KVANTA_INLINE ChannelScale LoadChannelScale(const uint16_t* scale, const uint16_t* offset) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kElementType) - 1);
  const Vec16::F x = Vec16::LoadFp16(scale);
  return {x, Vec16::Fma(Vec16::Set1(kMiddle), x, Vec16::LoadFp16(offset))};
}

// Multiplies kRows queries by the channel scales: maxima[i] and offsets[i] have row i's largest magnitude and its dot
// product with the channel offsets, per lane.
template <formats::ElementType kElementType, int kRows>
KVANTA_INLINE void MultiplyQueries(const KeyPass& pass, int64_t first_scale, int first_row, float* scaled, int width,
                                   Vec16::F* maxima, Vec16::F* offsets) {
  Vec16::F max[kRows], sum[kRows];
  for (int i = 0; i < kRows; ++i) max[i] = sum[i] = Vec16::Zero();
  const int head_dim = pass.cell.head_dim;
  const int64_t stride = pass.query_stride;
  const uint8_t* query = pass.query + first_row * stride;
  const uint16_t* scale = pass.cell.channel_scales + first_scale;
  const uint16_t* offset = pass.cell.channel_offsets + first_scale;
  const auto multiply = [&](const ChannelScale& channels, int c) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      const Vec16::F q = Vec16::Load(reinterpret_cast<const float*>(query + i * stride) + c);
      const Vec16::F x = Vec16::Mul(q, channels.scale);
      sum[i] = Vec16::Fma(q, channels.offset, sum[i]);  // NaN if a scale is NaN
      max[i] = Vec16::Max(max[i], Vec16::Abs(x));
      Vec16::Store(scaled + i * width + c, x);
    }
  };
  int c = 0;
  for (; c + 16 <= head_dim; c += 16) multiply(LoadChannelScale<kElementType>(scale + c, offset + c), c);
  if (c < head_dim) {  // the last 8 channels: fp16 loads read 16, so copy
    uint16_t last_scale[16] = {}, last_offset[16] = {};
    __builtin_memcpy(last_scale, scale + c, 16);
    __builtin_memcpy(last_offset, offset + c, 16);
    multiply(LoadChannelScale<kElementType>(last_scale, last_offset), c);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) maxima[i] = max[i], offsets[i] = sum[i];
}

// Quantizes q * scale of the rows for one token group, `stride` bytes apart. factors[row]: factor of a row's dots;
// query_offsets[row]: <q, offset>; both have room for a multiple of 4. kBias: whether dots have initial values.
template <formats::ElementType kElementType, bool kBias>
KVANTA_INLINE void ScaleQueries(const KeyPass& pass, int64_t first_scale, uint8_t* queries, int64_t stride,
                                float* factors, float* query_offsets) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kElementType) - 1);
  constexpr float kMaxOperand = SubbyteQuery::kMaxOperand;
  const int head_dim = pass.cell.head_dim, width = static_cast<int>(RoundUp(head_dim, 64));
  alignas(64) float scaled[4 * kMaxHeadDim];
  for (int row = 0; row < 4 * width; row += width) {  // padding beyond the last channel
    for (int c = static_cast<int>(RoundUp(head_dim, 16)); c < width; c += 16) {
      Vec16::Store(scaled + row + c, Vec16::Zero());
    }
  }
  for (int first = 0; first < pass.rows; first += 4) {  // four rows at a time, to share one reduction
    const int rows = pass.rows - first < 4 ? pass.rows - first : 4;
    Vec16::F maxima[4], sums[4];
    for (int i = rows; i < 4; ++i) sums[i] = Vec16::Zero();
    ForRowTiles<SubbyteQuery>(
        rows, [&]<int kRows>(RowCount<kRows>, int row) __attribute__((always_inline)) {
          MultiplyQueries<kElementType, kRows>(pass, first_scale, first + row, scaled + row * width, width,
                                               maxima + row, sums + row);
        });
    float largest[4], inverse[4];
    ReduceMaxima(maxima, rows, kMaxOperand, largest, inverse);
    Vec16::SumsOf(sums, query_offsets + first);
    for (int i = 0; i < rows; ++i) {
      uint8_t* out = queries + (first + i) * stride;
      factors[first + i] = largest[i] / kMaxOperand;
      for (int c = 0; c < width; c += 64) Bytes16::PackSigned(scaled + i * width + c, inverse[i], out + c);
      if constexpr (kBias) {
        const int32_t total = Bytes16::SumOf(out, width);
        int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<SubbyteQuery>(head_dim));
        reinterpret_cast<float*>(bias + kMaxBlocks)[0] = static_cast<float>(total);
        bias[0] = -kMiddle * total;
      }
    }
  }
}

// Calls score(scaled pass, scales, first group, last group) for each token group of the call.
template <formats::ElementType kElementType, bool kBias, class F>
KVANTA_INLINE void ScoreByTokenGroup(const KeyPass& pass, F score) {
  constexpr int64_t kMaxBytes = RoundUp(int64_t{kMaxHeadDim} * SubbyteQuery::kOperandBytes, 64) + 8 * kMaxBlocks;
  alignas(64) uint8_t queries[kPassRows * kMaxBytes];
  float factors[kPassRows], query_offsets[kPassRows];
  const CellView& cell = pass.cell;
  const int groups_per_scale = cell.token_group / 16;
  KeyScales scales;
  LoadKeyScales(cell, pass.groups, scales);
  KeyPass scaled_pass = pass;
  scaled_pass.query = queries;
  scaled_pass.query_stride = QueryBytes<SubbyteQuery>(cell.head_dim);
  scaled_pass.row_scale = factors;
  for (int first = 0; first < pass.groups; first += groups_per_scale) {
    const int64_t first_scale = int64_t{first} / groups_per_scale * cell.head_dim;
    ScaleQueries<kElementType, kBias>(pass, first_scale, queries, scaled_pass.query_stride, factors, query_offsets);
    for (int row = 0; row < pass.rows; ++row) {
      query_offsets[row] *= pass.row_scale[row];
      factors[row] *= pass.row_scale[row];
    }
    const int last = first + groups_per_scale < pass.groups ? first + groups_per_scale : pass.groups;
    score(scaled_pass, scales, first, last);
    for (int row = 0; row < pass.rows; ++row) {
      float* scores = pass.scores + row * kMaxPageTokens;
      for (int t = first * 16; t < last * 16; t += 16) {
        Vec16::Store(scores + t, Vec16::Add(Vec16::Load(scores + t), Vec16::Set1(query_offsets[row])));
      }
    }
  }
}

template <formats::ElementType kElementType>
void ScoreChannelScaled(const KeyPass& pass) {
  using Key = SubbyteKey<SubbyteTypeOf<kElementType>>;
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, RowTiles<Key>(pass.rows), kGroupsUnroll, Key::kChannelsOfStep)};
  ScoreByTokenGroup<kElementType, true>(
      pass, [&](const KeyPass& scaled, const KeyScales& scales, int first, int last)
                __attribute__((always_inline)) { AddScores<Key>(scaled, scales, first, last, prefetch); });
}

}  // namespace
}  // namespace kvanta::kernels
