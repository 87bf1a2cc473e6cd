// Codes below 8 bits whose kernels have no arithmetic of their own: fields become bytes on the stack (K: 16 tokens at a
// time, V: a page), and the kernels of int8 go over these. Included by isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "formats/code.h"
#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

using Word = uint32_t __attribute__((may_alias));

template <formats::Code kCode>
constexpr formats::CodeLevels kCodeLevels = formats::Levels(kCode);

// Whether the level is the field plus a constant.
template <formats::Code kCode>
constexpr bool kEvenLevels = [] {
  const formats::CodeLevels levels = formats::Levels(kCode);
  for (int field = 1; field < 1 << formats::CodeBits(kCode); ++field) {
    if (levels.level[field] != levels.level[0] + field) return false;
  }
  return true;
}();

// A word's four fields of `bits` bits at `shift`.
template <int kBits>
KVANTA_INLINE uint32_t Fields(uint32_t word, int shift) {
  return (word >> shift) & (((1U << kBits) - 1U) * 0x01010101U);
}

// Fields to levels in place, one per byte; n words.
template <formats::Code kCode>
KVANTA_INLINE void ToLevels(Word* words, int n) {
  if constexpr (kEvenLevels<kCode>) {  // without a borrow from byte to byte
    constexpr uint32_t kOffset = static_cast<uint32_t>(-kCodeLevels<kCode>.level[0]) * 0x01010101U;
    for (int i = 0; i < n; ++i) words[i] = ((words[i] | 0x80808080U) - kOffset) ^ 0x80808080U;
  } else {
    LookUpBytes(kCodeLevels<kCode>.level, reinterpret_cast<uint8_t*>(words), 4 * n);
  }
}

// The codes of a group of 16 tokens, as lines of int8: line L holds channels 8 (L / 2) + 2 b + L % 2, b = 0..3.
template <formats::Code kCode>
KVANTA_INLINE void UnpackKeys(const uint8_t* group, int head_dim, Word* out) {
  constexpr formats::CodeInfo kInfo = formats::Info(kCode);
  constexpr int kLow = kInfo.low_bits, kHigh = kInfo.high_bits;
  const Word* low = reinterpret_cast<const Word*>(group);
  const Word* high = low + int64_t{16} * head_dim * kLow / 32;
  for (int line = 0; line < head_dim / 4; ++line) {
    const Word* from = low + line / (8 / kLow) * 16;
    const int shift = line % (8 / kLow) * kLow;
    Word* to = out + line * 16;
    for (int i = 0; i < 16; ++i) to[i] = Fields<kLow>(from[i], shift);
    if constexpr (kHigh != 0) {
      const Word* top = high + line / (8 / kHigh) * 16;
      const int top_shift = line % (8 / kHigh) * kHigh;
      for (int i = 0; i < 16; ++i) to[i] |= Fields<kHigh>(top[i], top_shift) << kLow;
    }
  }
  ToLevels<kCode>(out, head_dim * 4);
}

// The codes of tokens [4 quad, 4 end_quad) of a cell, in the order of int8's cells.
template <formats::Code kCode>
KVANTA_INLINE void UnpackValues(const uint8_t* codes, int head_dim, int quad, int end_quad, Word* out) {
  constexpr formats::CodeInfo kInfo = formats::Info(kCode);
  constexpr int kLow = kInfo.low_bits, kHigh = kInfo.high_bits;
  const int row_bytes = head_dim * (kLow + kHigh) / 8;
  for (; quad < end_quad; ++quad, out += head_dim) {
    const Word* low = reinterpret_cast<const Word*>(codes) + int64_t{quad} * row_bytes;
    const Word* high = low + head_dim * kLow / 8;
    for (int eight = 0; eight < head_dim / 8; ++eight) {
      const Word* from = low + eight / (4 / kLow) * 4;
      const int shift = eight % (4 / kLow) * 2 * kLow;
      Word* to = out + eight * 8;
      for (int i = 0; i < 4; ++i) {
        to[2 * i] = Fields<kLow>(from[i], shift);
        to[2 * i + 1] = Fields<kLow>(from[i], shift + kLow);
      }
      if constexpr (kHigh != 0) {
        const Word* top = high + eight / (4 / kHigh) * 4;
        const int top_shift = eight % (4 / kHigh) * 2 * kHigh;
        for (int i = 0; i < 4; ++i) {
          to[2 * i] |= Fields<kHigh>(top[i], top_shift) << kLow;
          to[2 * i + 1] |= Fields<kHigh>(top[i], top_shift + kHigh) << kLow;
        }
      }
    }
    ToLevels<kCode>(out, head_dim);
  }
}

// The query in the channels' order of UnpackKeys().
template <formats::Code kCode>
float PrepareUnpacked(const float* query, int head_dim, int block, uint8_t* out) {
  alignas(64) float x[kMaxHeadDim];
  for (int eight = 0; eight < head_dim; eight += 8) {
    for (int i = 0; i < 8; ++i) x[eight + i] = query[eight + i % 4 * 2 + i / 4];
  }
  return PrepareQuery<CodeInt8>(x, head_dim, block, out) * kCodeLevels<kCode>.unit;
}

// One function for all codes: inlined into each, it would be most of the unit's code and of the time to compile it.
__attribute__((noinline)) void ScoreBytes(const KeyPass& pass, const Word* lines, int group, Prefetcher& prefetch) {
  ScoreGroup<CodeInt8>(pass, reinterpret_cast<const uint8_t*>(lines), group, prefetch);
}

template <formats::Code kCode>
KVANTA_INLINE void ScoreUnpackedGroup(const KeyPass& pass, int group, Prefetcher& prefetch) {
  alignas(64) Word lines[4 * kMaxHeadDim];
  constexpr int kBits = formats::CodeBits(kCode);
  const int64_t group_bytes = int64_t{16} * pass.cell.head_dim * kBits / 8;
  UnpackKeys<kCode>(pass.cell.codes + group * group_bytes, pass.cell.head_dim, lines);
  ScoreBytes(pass, lines, group, prefetch);
}

template <formats::Code kCode>
void ScoreUnpacked(const KeyPass& pass) {
  Prefetcher prefetch{pass.prefetch.next, pass.prefetch.end};
  for (int group = 0; group < pass.groups; ++group) ScoreUnpackedGroup<kCode>(pass, group, prefetch);
  prefetch.Rest();
}

// ---- keys with a scale and a zero per channel: prepared queries are f32, and become coefficients tile by tile

inline int64_t TiledQueryBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);
}

inline float PrepareTiled(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  __builtin_memcpy(out, query, sizeof(float) * static_cast<size_t>(head_dim));
  return 1.0f;
}

// One row's query for one tile: coefficients of q * scale; returns <q, zero>.
template <formats::Code kCode>
KVANTA_INLINE float ScaleQuery(const float* query, const uint16_t* scales, const uint16_t* zeros, int head_dim,
                               uint8_t* out, float& factor) {
  alignas(64) float x[kMaxHeadDim];
  Lanes::F sum = Lanes::Zero();
  for (int c = 0; c < head_dim; c += 16) {
    if (c + 16 <= head_dim) {
      const Lanes::F q = Lanes::Load(query + c);
      sum = Lanes::Fma(q, Lanes::LoadFp16(zeros + c), sum);
      Lanes::Store(x + c, Lanes::Mul(q, Lanes::LoadFp16(scales + c)));
    } else {  // the last 8 channels: fp16 is read by 16, so from a copy
      uint16_t scale[16] = {}, zero[16] = {};
      __builtin_memcpy(scale, scales + c, 16);
      __builtin_memcpy(zero, zeros + c, 16);
      const Lanes::F q = Lanes::LoadTail(query + c, 8);
      sum = Lanes::Fma(q, Lanes::LoadFp16(zero), sum);
      Lanes::Store(x + c, Lanes::Mul(q, Lanes::LoadFp16(scale)));
    }
  }
  factor = PrepareUnpacked<kCode>(x, head_dim, 0, out);
  return Lanes::Sum(sum);
}

template <formats::Code kCode>
void ScoreTiled(const KeyPass& pass) {
  constexpr int64_t kMostBytes = RoundUp(int64_t{kMaxHeadDim} * CodeInt8::kCoefficientBytes, 64) + 8 * kMaxBlocks;
  alignas(64) uint8_t queries[kPassRows * kMostBytes];
  float factors[kPassRows], zeros[kPassRows];
  const CellView& cell = pass.cell;
  const int groups_of_tile = cell.tile / 16;
  KeyPass tile_pass = pass;
  tile_pass.query = queries;
  tile_pass.query_stride = QueryBytes<CodeInt8>(cell.head_dim);
  tile_pass.row_scale = factors;
  Prefetcher prefetch{pass.prefetch.next, pass.prefetch.end};
  for (int first = 0; first < pass.groups; first += groups_of_tile) {
    const int64_t meta = int64_t{first} / groups_of_tile * cell.head_dim;
    for (int row = 0; row < pass.rows; ++row) {
      const float* query = reinterpret_cast<const float*>(pass.query + row * pass.query_stride);
      zeros[row] = ScaleQuery<kCode>(query, cell.channel_scales + meta, cell.channel_zeros + meta, cell.head_dim,
                                     queries + row * tile_pass.query_stride, factors[row]) *
                   pass.row_scale[row];
      factors[row] *= pass.row_scale[row];
    }
    for (int group = first; group < first + groups_of_tile && group < pass.groups; ++group) {
      ScoreUnpackedGroup<kCode>(tile_pass, group, prefetch);
      for (int row = 0; row < pass.rows; ++row) {
        float* scores = pass.scores + row * kMaxPageTokens + group * 16;
        Lanes::Store(scores, Lanes::Add(Lanes::Load(scores), Lanes::Set1(zeros[row])));
      }
    }
  }
  prefetch.Rest();
}

// ---- PV

template <formats::Code kCode>
void AccumulateUnpacked(const ValuePass& pass) {
  alignas(64) Word words[kMaxPageTokens / 4 * kMaxHeadDim];
  const int quad = pass.begin / 4, end_quad = (pass.end + 3) / 4;
  UnpackValues<kCode>(pass.cell.codes, pass.cell.head_dim, quad, end_quad, words + int64_t{quad} * pass.cell.head_dim);
  ValuePass bytes = pass;
  bytes.cell.codes = reinterpret_cast<const uint8_t*>(words);
  bytes.scale *= kCodeLevels<kCode>.unit;
  Accumulate<CodeInt8>(bytes);
}

}  // namespace
}  // namespace kvanta::kernels
