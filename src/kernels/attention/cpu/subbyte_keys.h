// The attention kernels of keys in narrow codes (codes_narrow.h), also of those with a scale and a zero per channel;
// included by isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/subbyte_codes.h"
#include "kernels/attention/cpu/kernels.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Constants: where a compiler does not inline a call, the function is one that a linker might share between units.
template <formats::ElementType kElementType>
inline constexpr float kLevelUnit = formats::Levels(kElementType).unit;
template <formats::ElementType kElementType>
inline constexpr int kLevelOffset = SubbyteLevelsOf(kElementType).offset;

template <formats::ElementType kElementType>
float PrepareSubbyte(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<SubbyteQuery>(query, head_dim, block, kLevelOffset<kElementType>, out) * kLevelUnit<kElementType>;
}

// ---- QK

// Scales and zeros of a page as f32, [blocks][page_tokens]; scales of 1 where there are none.
struct KeyScales {
  alignas(64) float scale[kMaxBlocks * kMaxPageTokens];
  alignas(64) float zero[kMaxBlocks * kMaxPageTokens];
};
__attribute__((noinline)) void LoadKeyScales(const CellView& cell, int groups, KeyScales& scales) {
  const int blocks = ScaleBlocks(cell);
  const auto each = [&](auto load) __attribute__((always_inline)) {
    for (int b = 0; b < blocks; ++b) {
      for (int slot = b * cell.page_tokens; slot < b * cell.page_tokens + groups * 16; slot += 16) load(slot);
    }
  };
  ForTypeOf(
      cell.block_scales, [&](auto type) __attribute__((always_inline)) {
        each([&](int slot) {
          Vec16::Store(scales.scale + slot, LoadScalesOf<decltype(type)::kScale>(cell.block_scales.data, slot));
        });
      });
  if (cell.block_offsets) {
    each([&](int slot) { Vec16::Store(scales.zero + slot, Vec16::LoadFp16(cell.block_offsets + slot)); });
  }
}

// Rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes are `lines`.
template <class Key, int kGroups, int kRows>
KVANTA_INLINE void ScoreSubbyteTile(const KeyPass& pass, const KeyScales& scales, const uint8_t* lines, int group,
                                    int row, Prefetcher& prefetch) {
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
  for (int i = 0; i < kSums; ++i) sums[i] = Vec16::Zero();
  const float* scale_of_block = scales.scale + group * 16;
  for (int first = 0, of_block = 0, b = 0; first < cell.head_dim;) {
    // Parts of a block are as good as the whole: integers below 2^24 are exact in f32.
    Bytes16::Sum dots[kSums];
    int32_t starts[kRows];
    for (int r = 0; r < kRows; ++r) starts[r] = of_block == 0 ? bias[r][b] : 0;
    const bool whole = block - of_block >= Key::kBlock;
    if (whole) {
      Key::template Dot<kGroups, kRows, Key::kBlock>(low, high, group_bytes, query, starts, dots, prefetch);
    } else {
      Key::template Dot<kGroups, kRows, Key::kStep>(low, high, group_bytes, query, starts, dots, prefetch);
    }
    const int channels = whole ? Key::kBlock : Key::kStep;
    for (int i = 0; i < kSums; ++i) {
      sums[i] = Vec16::Fma(Bytes16::ToFloat(dots[i]), Vec16::Load(scale_of_block + 16 * (i % kGroups)), sums[i]);
    }
    for (int r = 0; r < kRows; ++r) query[r] += channels;
    low += channels * Key::kLow * 2;
    high += channels * Key::kHigh * 2;
    first += channels;
    of_block += channels;
    if (of_block == block) {
      of_block = 0;
      ++b;
      scale_of_block += cell.page_tokens;
    }
  }
  for (int b = 0; cell.block_offsets && b < cell.head_dim / block; ++b) {
    const float* zeros = scales.zero + b * cell.page_tokens + group * 16;
    for (int i = 0; i < kSums; ++i) {
      const Vec16::F total = Vec16::Set1(Totals<Key>(pass, row + i / kGroups)[b]);
      sums[i] = Vec16::Fma(total, Vec16::Load(zeros + 16 * (i % kGroups)), sums[i]);
    }
  }
  for (int i = 0; i < kSums; ++i) {
    const int r = row + i / kGroups, first = (group + i % kGroups) * 16;
    if (cell.token_scales) sums[i] = Vec16::Mul(sums[i], LoadScales(cell.token_scales, first));
    if (cell.token_offsets) {
      sums[i] = Vec16::Fma(Vec16::Set1(Totals<Key>(pass, r)[0]), Vec16::LoadFp16(cell.token_offsets + first), sums[i]);
    }
    Vec16::Store(pass.scores + r * kMaxPageTokens + first, Vec16::Mul(sums[i], Vec16::Set1(pass.row_scale[r])));
  }
}

template <class Key, int kGroups>
KVANTA_INLINE void ScoreSubbyteGroups(const KeyPass& pass, const KeyScales& scales, const uint8_t* lines, int group,
                                      Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    ScoreSubbyteTile<Key, kGroups, kQueryTile>(pass, scales, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) ScoreSubbyteTile<Key, kGroups, 3>(pass, scales, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) ScoreSubbyteTile<Key, kGroups, 2>(pass, scales, lines, group, row, prefetch);
  }
  if (pass.rows - row == 1) ScoreSubbyteTile<Key, kGroups, 1>(pass, scales, lines, group, row, prefetch);
}

// Groups [first, last).
template <class Key>
KVANTA_INLINE void AddScores(const KeyPass& pass, const KeyScales& scales, int first, int last, Prefetcher& prefetch) {
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * Key::kBits * 2;
  int group = first;
  for (; group + kRunsUnroll <= last; group += kRunsUnroll) {
    ScoreSubbyteGroups<Key, kRunsUnroll>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < last) ScoreSubbyteGroups<Key, 1>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
}

template <class Key>
void ScoreSubbyte(const KeyPass& pass) {
  KeyScales scales;
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, kRunsUnroll, Key::kChannelsOfStep)};
  LoadKeyScales(pass.cell, pass.groups, scales);
  AddScores<Key>(pass, scales, 0, pass.groups, prefetch);
}

// ---- keys with a scale and a zero per channel: prepared queries are f32, and become coefficients tile by tile

inline int64_t TiledQueryBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);
}

inline float PrepareTiled(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  __builtin_memset(out, 0, static_cast<size_t>(TiledQueryBytes(head_dim)));
  __builtin_memcpy(out, query, sizeof(float) * static_cast<size_t>(head_dim));
  Vec16::F sum = Vec16::Zero();
  for (int c = 0; c < head_dim; c += 16) sum = Vec16::Add(sum, LoadChannels(query, c, head_dim));
  return 1.0f + 0 * Vec16::Sum(sum);  // NaN and infinities must not become numbers
}

// A tile's scales and zeros as f32, 0 behind the last channel. The zero is taken in the middle of the codes: it meets
// the query as it is, and far from it codes would multiply what the coefficients lost.
template <formats::ElementType kElementType>
KVANTA_INLINE void LoadTile(const CellView& cell, int64_t meta, float* scales, float* zeros) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kElementType) - 1);
  for (int c = 0; c < cell.head_dim; c += 16) {
    const uint16_t* scale = cell.channel_scales + meta + c;
    const uint16_t* zero = cell.channel_offsets + meta + c;
    uint16_t last_scale[16] = {}, last_zero[16] = {};
    if (c + 16 > cell.head_dim) {  // the last 8 channels: fp16 is read by 16, so from a copy
      __builtin_memcpy(last_scale, scale, 16);
      __builtin_memcpy(last_zero, zero, 16);
      scale = last_scale;
      zero = last_zero;
    }
    Vec16::Store(scales + c, Vec16::LoadFp16(scale));
    Vec16::Store(zeros + c, Vec16::Fma(Vec16::Set1(kMiddle), Vec16::LoadFp16(scale), Vec16::LoadFp16(zero)));
  }
}

// What a row's query comes to with a tile's scales and zeros: its products, their largest, and the sum with the zeros.
struct ScaledQuery {
  Vec16::F max_value;
  Vec16::F offset;
};
KVANTA_INLINE ScaledQuery ScaleQuery(const float* query, const float* scales, const float* zeros, int head_dim,
                                     float* scaled) {
  Vec16::F offset = Vec16::Zero(), max_value = Vec16::Zero();
#pragma GCC unroll 4
  for (int c = 0; c < head_dim; c += 16) {
    const Vec16::F q = Vec16::Load(query + c);
    const Vec16::F x = Vec16::Mul(q, Vec16::Load(scales + c));
    offset = Vec16::Fma(q, Vec16::Load(zeros + c), offset);  // a scale that is no number makes this none
    max_value = Vec16::Max(max_value, Vec16::Abs(x));
    Vec16::Store(scaled + c, x);
  }
  return {max_value, offset};
}

// The rows' queries for one tile: coefficients of q * scale, `stride` bytes apart. factors[row]: what their dots must
// be multiplied with; offsets[row]: <q, zero>; both have room for a multiple of 4. kBias: whether dots start from one.
template <formats::ElementType kElementType, bool kBias>
KVANTA_INLINE void ScaleQueries(const KeyPass& pass, int64_t meta, uint8_t* queries, int64_t stride, float* factors,
                                float* offsets) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kElementType) - 1);
  constexpr float kLargest = SubbyteQuery::kLargest;
  const int head_dim = pass.cell.head_dim, width = static_cast<int>(RoundUp(head_dim, 64));
  alignas(64) float scales[kMaxHeadDim], zeros[kMaxHeadDim];
  alignas(64) float scaled[4 * kMaxHeadDim];
  LoadTile<kElementType>(pass.cell, meta, scales, zeros);
  for (int row = 0; row < 4 * width; row += width) {  // what there is behind the channels
    for (int c = static_cast<int>(RoundUp(head_dim, 16)); c < width; c += 16) {
      Vec16::Store(scaled + row + c, Vec16::Zero());
    }
  }
  for (int first = 0; first < pass.rows; first += 4) {  // by four, so that their reductions are one
    const int rows = pass.rows - first < 4 ? pass.rows - first : 4;
    Vec16::F argmaxes[4], sums[4];
    for (int i = 0; i < 4; ++i) argmaxes[i] = sums[i] = Vec16::Zero();
    for (int i = 0; i < rows; ++i) {
      const float* query = reinterpret_cast<const float*>(pass.query + (first + i) * pass.query_stride);
      const ScaledQuery row = ScaleQuery(query, scales, zeros, head_dim, scaled + i * width);
      argmaxes[i] = row.max_value;
      sums[i] = row.offset;
    }
    float largest[4];
    Vec16::MaximaOf(argmaxes, largest);
    Vec16::SumsOf(sums, offsets + first);
    for (int i = 0; i < rows; ++i) {
      const float max_value = largest[i] > kSmallestMax ? largest[i] : kSmallestMax;
      uint8_t* out = queries + (first + i) * stride;
      factors[first + i] = max_value / kLargest;
      for (int c = 0; c < width; c += 64) Bytes16::PackSigned(scaled + i * width + c, kLargest / max_value, out + c);
      if constexpr (kBias) {
        const int32_t total = Bytes16::SumOf(out, width);
        int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<SubbyteQuery>(head_dim));
        reinterpret_cast<float*>(bias + kMaxBlocks)[0] = static_cast<float>(total);
        bias[0] = -kMiddle * total;
      }
    }
  }
}

// score(pass of a tile, scales, first group, last group): of each tile of the pass.
template <formats::ElementType kElementType, bool kBias, class F>
KVANTA_INLINE void ScoreTiledBy(const KeyPass& pass, F score) {
  constexpr int64_t kMaxBytes = RoundUp(int64_t{kMaxHeadDim} * SubbyteQuery::kOperandBytes, 64) + 8 * kMaxBlocks;
  alignas(64) uint8_t queries[kPassRows * kMaxBytes];
  float factors[kPassRows], zeros[kPassRows];
  const CellView& cell = pass.cell;
  const int groups_of_tile = cell.tile / 16;
  KeyScales scales;
  LoadKeyScales(cell, pass.groups, scales);
  KeyPass tile_pass = pass;
  tile_pass.query = queries;
  tile_pass.query_stride = QueryBytes<SubbyteQuery>(cell.head_dim);
  tile_pass.row_scale = factors;
  for (int first = 0; first < pass.groups; first += groups_of_tile) {
    const int64_t meta = int64_t{first} / groups_of_tile * cell.head_dim;
    ScaleQueries<kElementType, kBias>(pass, meta, queries, tile_pass.query_stride, factors, zeros);
    for (int row = 0; row < pass.rows; ++row) {
      zeros[row] *= pass.row_scale[row];
      factors[row] *= pass.row_scale[row];
    }
    const int last = first + groups_of_tile < pass.groups ? first + groups_of_tile : pass.groups;
    score(tile_pass, scales, first, last);
    for (int row = 0; row < pass.rows; ++row) {
      float* scores = pass.scores + row * kMaxPageTokens;
      for (int t = first * 16; t < last * 16; t += 16) {
        Vec16::Store(scores + t, Vec16::Add(Vec16::Load(scores + t), Vec16::Set1(zeros[row])));
      }
    }
  }
}

template <formats::ElementType kElementType>
void ScoreTiled(const KeyPass& pass) {
  using Key = SubbyteKey<SubbyteTypeOf<kElementType>>;
  Prefetcher prefetch{pass.prefetch, ScoreSteps(pass, kRunsUnroll, Key::kChannelsOfStep)};
  ScoreTiledBy<kElementType, true>(
      pass, [&](const KeyPass& of_tile, const KeyScales& scales, int first, int last)
                __attribute__((always_inline)) { AddScores<Key>(of_tile, scales, first, last, prefetch); });
}

}  // namespace
}  // namespace kvanta::kernels
