// The attention kernels of narrow codes (codes_narrow.h), and of keys with a scale and a zero per channel; included by
// isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "formats/code.h"
#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/codes_narrow.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Constants: where a compiler does not inline a call, the function is one that a linker might share between units.
template <formats::Code kCode>
inline constexpr float kLevelUnit = formats::Levels(kCode).unit;
template <formats::Code kCode>
inline constexpr int kLevelOffset = NarrowLevelsOf(kCode).offset;

template <formats::Code kCode>
float PrepareNarrow(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<NarrowQuery>(query, head_dim, block, kLevelOffset<kCode>, out) * kLevelUnit<kCode>;
}

// ---- QK

// Scales and zeros of a page as f32, [blocks][page_tokens]; scales of 1 where there are none.
struct KeyScales {
  alignas(64) float scale[kMaxBlocks * kMaxPageTokens];
  alignas(64) float zero[kMaxBlocks * kMaxPageTokens];
};
__attribute__((noinline)) void LoadKeyScales(const CellView& cell, int groups, KeyScales& scales) {
  const int blocks = cell.block_scales ? cell.head_dim / cell.block : 1;
  for (int b = 0; b < blocks; ++b) {
    for (int group = 0; group < groups; ++group) {
      const int slot = b * cell.page_tokens + group * 16;
      Lanes::Store(scales.scale + slot, cell.block_scales ? LoadScales(cell.block_scales, slot) : Lanes::Set1(1));
      if (cell.block_zeros) Lanes::Store(scales.zero + slot, Lanes::LoadFp16(cell.block_zeros + slot));
    }
  }
}

// Rows [row, row + kRows) on kGroups groups of 16 tokens from `group` on, whose codes are `lines`.
template <class Key, int kGroups, int kRows>
KVANTA_INLINE void ScoreNarrowTile(const KeyPass& pass, const KeyScales& scales, const uint8_t* lines, int group,
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
  Lanes::F sums[kSums];
  for (int r = 0; r < kRows; ++r) {
    query[r] = pass.query + (row + r) * pass.query_stride;
    bias[r] = reinterpret_cast<const int32_t*>(query[r] + bias_offset);
  }
  for (int i = 0; i < kSums; ++i) sums[i] = Lanes::Zero();
  const float* scale_of_block = scales.scale + group * 16;
  for (int first = 0, of_block = 0, b = 0; first < cell.head_dim;) {
    // Parts of a block are as good as the whole: integers below 2^24 are exact in f32.
    Bytes16::Sum dots[kSums];
    const bool whole = block - of_block >= Key::kBlock;
    if (whole) {
      Key::template Dot<kGroups, kRows, Key::kBlock>(low, high, group_bytes, query, dots);
    } else {
      Key::template Dot<kGroups, kRows, Key::kStep>(low, high, group_bytes, query, dots);
    }
    const int channels = whole ? Key::kBlock : Key::kStep;
    prefetch.Lines(kGroups * channels * Key::kBits / 32);
    for (int i = 0; i < kSums; ++i) {
      const Bytes16::Sum dot = of_block == 0 ? Bytes16::Plus(dots[i], bias[i / kGroups][b]) : dots[i];
      sums[i] = Lanes::Fma(Bytes16::ToFloat(dot), Lanes::Load(scale_of_block + 16 * (i % kGroups)), sums[i]);
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
  for (int b = 0; cell.block_zeros && b < cell.head_dim / block; ++b) {
    const float* zeros = scales.zero + b * cell.page_tokens + group * 16;
    for (int i = 0; i < kSums; ++i) {
      const Lanes::F total = Lanes::Set1(Totals<Key>(pass, row + i / kGroups)[b]);
      sums[i] = Lanes::Fma(total, Lanes::Load(zeros + 16 * (i % kGroups)), sums[i]);
    }
  }
  for (int i = 0; i < kSums; ++i) {
    const int r = row + i / kGroups, first = (group + i % kGroups) * 16;
    if (cell.token_scales) sums[i] = Lanes::Mul(sums[i], LoadScales(cell.token_scales, first));
    if (cell.token_zeros) {
      sums[i] = Lanes::Fma(Lanes::Set1(Totals<Key>(pass, r)[0]), Lanes::LoadFp16(cell.token_zeros + first), sums[i]);
    }
    Lanes::Store(pass.scores + r * kMaxPageTokens + first, Lanes::Mul(sums[i], Lanes::Set1(pass.row_scale[r])));
  }
}

template <class Key, int kGroups>
KVANTA_INLINE void ScoreNarrowGroups(const KeyPass& pass, const KeyScales& scales, const uint8_t* lines, int group,
                                     Prefetcher& prefetch) {
  int row = 0;
  for (; row + kQueryTile <= pass.rows; row += kQueryTile) {
    ScoreNarrowTile<Key, kGroups, kQueryTile>(pass, scales, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 3) {
    if (pass.rows - row == 3) ScoreNarrowTile<Key, kGroups, 3>(pass, scales, lines, group, row, prefetch);
  }
  if constexpr (kQueryTile > 2) {
    if (pass.rows - row == 2) ScoreNarrowTile<Key, kGroups, 2>(pass, scales, lines, group, row, prefetch);
  }
  if (pass.rows - row == 1) ScoreNarrowTile<Key, kGroups, 1>(pass, scales, lines, group, row, prefetch);
}

// Groups [first, last).
template <class Key>
KVANTA_INLINE void AddScores(const KeyPass& pass, const KeyScales& scales, int first, int last, Prefetcher& prefetch) {
  const int64_t group_bytes = int64_t{pass.cell.head_dim} * Key::kBits * 2;
  int group = first;
  for (; group + kRunsBeside <= last; group += kRunsBeside) {
    ScoreNarrowGroups<Key, kRunsBeside>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
  }
  if (group < last) ScoreNarrowGroups<Key, 1>(pass, scales, pass.cell.codes + group * group_bytes, group, prefetch);
}

template <class Key>
void ScoreNarrow(const KeyPass& pass) {
  KeyScales scales;
  LoadKeyScales(pass.cell, pass.groups, scales);
  Prefetcher prefetch{pass.prefetch};
  AddScores<Key>(pass, scales, 0, pass.groups, prefetch);
  prefetch.Rest();
}

// ---- keys with a scale and a zero per channel: prepared queries are f32, and become coefficients tile by tile

inline int64_t TiledQueryBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);
}

inline float PrepareTiled(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  __builtin_memset(out, 0, static_cast<size_t>(TiledQueryBytes(head_dim)));
  __builtin_memcpy(out, query, sizeof(float) * static_cast<size_t>(head_dim));
  return 1.0f;
}

// A tile's scales and zeros as f32, 0 behind the last channel. The zero is taken in the middle of the codes: it meets
// the query as it is, and far from it codes would multiply what the coefficients lost.
template <formats::Code kCode>
KVANTA_INLINE void LoadTile(const CellView& cell, int64_t meta, float* scales, float* zeros) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kCode) - 1);
  for (int c = 0; c < cell.head_dim; c += 16) {
    const uint16_t* scale = cell.channel_scales + meta + c;
    const uint16_t* zero = cell.channel_zeros + meta + c;
    uint16_t last_scale[16] = {}, last_zero[16] = {};
    if (c + 16 > cell.head_dim) {  // the last 8 channels: fp16 is read by 16, so from a copy
      __builtin_memcpy(last_scale, scale, 16);
      __builtin_memcpy(last_zero, zero, 16);
      scale = last_scale;
      zero = last_zero;
    }
    Lanes::Store(scales + c, Lanes::LoadFp16(scale));
    Lanes::Store(zeros + c, Lanes::Fma(Lanes::Set1(kMiddle), Lanes::LoadFp16(scale), Lanes::LoadFp16(zero)));
  }
}

// The rows' queries for one tile: coefficients of q * scale, `stride` bytes apart. factors[row]: what their dots must
// be multiplied with; offsets[row]: <q, zero>.
template <formats::Code kCode>
KVANTA_INLINE void ScaleQueries(const KeyPass& pass, int64_t meta, uint8_t* queries, int64_t stride, float* factors,
                                float* offsets) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kCode) - 1);
  const int head_dim = pass.cell.head_dim, width = static_cast<int>(RoundUp(head_dim, 16));
  alignas(64) float scales[kMaxHeadDim], zeros[kMaxHeadDim];
  alignas(64) float scaled[kPassRows * kMaxHeadDim];
  LoadTile<kCode>(pass.cell, meta, scales, zeros);
  Quantizer quantizers[kPassRows];
  for (int row = 0; row < pass.rows; ++row) {
    const float* query = reinterpret_cast<const float*>(pass.query + row * pass.query_stride);
    Lanes::F offset = Lanes::Zero(), sum = Lanes::Zero(), peak = Lanes::Zero();
    for (int c = 0; c < head_dim; c += 16) {
      const Lanes::F q = Lanes::Load(query + c);
      const Lanes::F x = Lanes::Mul(q, Lanes::Load(scales + c));
      offset = Lanes::Fma(q, Lanes::Load(zeros + c), offset);
      sum = Lanes::Add(sum, x);
      peak = Lanes::Max(peak, Magnitude(x));
      Lanes::Store(scaled + row * width + c, x);
    }
    quantizers[row] = QuantizerOf<NarrowQuery>(peak);
    factors[row] = quantizers[row].unit + 0 * Lanes::Sum(sum);  // NaN and infinities must not become numbers
    offsets[row] = Lanes::Sum(offset);
  }
  for (int row = 0; row < pass.rows; ++row) {  // apart, so that the rows' reductions overlap
    uint8_t* out = queries + row * stride;
    int32_t* bias = reinterpret_cast<int32_t*>(out + BiasOffset<NarrowQuery>(head_dim));
    float* totals = reinterpret_cast<float*>(bias + kMaxBlocks);
    totals[0] = Lanes::Sum(PackRun<NarrowQuery>(scaled + row * width, width, quantizers[row].inverse, out));
    bias[0] = Bias(totals[0], kMiddle);
  }
}

template <formats::Code kCode>
void ScoreTiled(const KeyPass& pass) {
  using Key = NarrowKey<NarrowCodeOf<kCode>>;
  constexpr int64_t kMostBytes = RoundUp(int64_t{kMaxHeadDim} * Key::kCoefficientBytes, 64) + 8 * kMaxBlocks;
  alignas(64) uint8_t queries[kPassRows * kMostBytes];
  float factors[kPassRows], zeros[kPassRows];
  const CellView& cell = pass.cell;
  const int groups_of_tile = cell.tile / 16;
  KeyScales scales;
  LoadKeyScales(cell, pass.groups, scales);
  KeyPass tile_pass = pass;
  tile_pass.query = queries;
  tile_pass.query_stride = QueryBytes<Key>(cell.head_dim);
  tile_pass.row_scale = factors;
  Prefetcher prefetch{pass.prefetch};
  for (int first = 0; first < pass.groups; first += groups_of_tile) {
    const int64_t meta = int64_t{first} / groups_of_tile * cell.head_dim;
    ScaleQueries<kCode>(pass, meta, queries, tile_pass.query_stride, factors, zeros);
    for (int row = 0; row < pass.rows; ++row) {
      zeros[row] *= pass.row_scale[row];
      factors[row] *= pass.row_scale[row];
    }
    const int last = first + groups_of_tile < pass.groups ? first + groups_of_tile : pass.groups;
    AddScores<Key>(tile_pass, scales, first, last, prefetch);
    for (int group = first; group < last; ++group) {
      for (int row = 0; row < pass.rows; ++row) {
        float* scores = pass.scores + row * kMaxPageTokens + group * 16;
        Lanes::Store(scores, Lanes::Add(Lanes::Load(scores), Lanes::Set1(zeros[row])));
      }
    }
  }
  prefetch.Rest();
}

// ---- PV

// Slots [begin, end) of a page, that share the units of their weights. A copy of the whole pass with other ends would
// be waited for: it is read before its parts have reached the cache.
struct SlotRange {
  int begin;
  int end;

  // Of whole vectors.
  KVANTA_INLINE int First() const { return begin / 16 * 16; }
  KVANTA_INLINE int Last() const { return static_cast<int>(RoundUp(end, 16)); }
};

// Scales of a range of slots, and what of them all rows share.
struct SlotScales {
  alignas(64) float share[kMaxBlocks][kMaxPageTokens];     // of the block's largest, without signs
  alignas(64) float zero[kMaxBlocks][kMaxPageTokens];      // of the code that values are met less
  alignas(64) float most[kMaxPageTokens];                  // largest share of a slot
  alignas(64) uint8_t signs[kMaxBlocks * kMaxPageTokens];  // [blocks][page_tokens], as Bytes16 writes them
  float largest[kMaxBlocks];
};

// largest[i]: the largest lane of peaks[i]; both have room for a multiple of 4.
KVANTA_INLINE void LargestOf(Lanes::F* peaks, int count, float* largest) {
  for (int i = count; i % 4 != 0; ++i) peaks[i] = Lanes::Zero();
  for (int i = 0; i < count; i += 4) Lanes::MaximaOf(peaks + i, largest + i);
}

// `middle`: the code that values with zeros are met less.
template <bool kScaleSigns>
__attribute__((noinline)) void LoadSlots(const CellView& cell, SlotRange range, int middle, SlotScales& slots) {
  const int first = range.First(), last = range.Last();
  const bool in_blocks = static_cast<bool>(cell.block_scales);
  const ScalePlane& scales = in_blocks ? cell.block_scales : cell.token_scales;
  const uint16_t* zeros = in_blocks ? cell.block_zeros : cell.token_zeros;
  const int blocks = in_blocks ? cell.head_dim / cell.block : 1;
  Lanes::F peaks[kMaxBlocks];
  for (int b = 0; b < blocks; ++b) {
    Lanes::F peak = Lanes::Zero();
    for (int t = first; t < last; t += 16) {
      const int slot = b * cell.page_tokens + t;
      // Scales and zeros of unused slots may be anything.
      const bool whole = range.begin <= t && t + 16 <= range.end;
      Lanes::F scale = scales ? LoadScales(scales, slot) : Lanes::Set1(1);
      if (!whole) scale = KeepOr(scale, 0.0f, range.begin - t, range.end - t);
      if (zeros) {
        Lanes::F zero = Lanes::LoadFp16(zeros + slot);
        if (!whole) zero = KeepOr(zero, 0.0f, range.begin - t, range.end - t);
        Lanes::Store(slots.zero[b] + t, Lanes::Fma(scale, Lanes::Set1(static_cast<float>(middle)), zero));
      }
      if constexpr (kScaleSigns) {
        Bytes16::Signs(scale, slots.signs + slot);
        scale = Magnitude(scale);
      }
      peak = Lanes::Max(peak, scale);
      Lanes::Store(slots.share[b] + t, scale);
    }
    peaks[b] = peak;
  }
  LargestOf(peaks, blocks, slots.largest);
  float inverse[kMaxBlocks];
  for (int b = 0; b < blocks; ++b) inverse[b] = slots.largest[b] > kSmallestPeak ? 1 / slots.largest[b] : 0.0f;
  for (int t = first; t < last; t += 16) {
    Lanes::F most = Lanes::Zero();
    for (int b = 0; b < blocks; ++b) {
      const Lanes::F part = Lanes::Mul(Lanes::Load(slots.share[b] + t), Lanes::Set1(inverse[b]));
      Lanes::Store(slots.share[b] + t, part);
      most = Lanes::Max(most, part);
    }
    Lanes::Store(slots.most + t, most);
  }
}

// p times the slots' scales as bytes. A row's unit is that of its largest p times a slot's largest share, so its p are
// scaled once for all blocks; units are somewhat larger than if each block had its own.
// scale: of the side and of the code's levels.
__attribute__((noinline)) void WeighSlots(const ValuePass& pass, SlotRange range, float scale, const SlotScales& slots,
                                          Weights& weights, Prefetcher& prefetch) {
  const int first = range.First(), last = range.Last();
  const CellView& cell = pass.cell;
  const int blocks = cell.block_scales ? cell.head_dim / cell.block : 1;
  const bool zeros = cell.block_zeros != nullptr || cell.token_zeros != nullptr;
  weights.rows = pass.weights;
  weights.row_stride = kWeightBytes;
  weights.block_stride = cell.page_tokens;
  weights.signs = slots.signs;
  Lanes::F peaks[kPassRows];
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    Lanes::F peak = Lanes::Zero();
    for (int t = first; t < last; t += 16) {
      peak = Lanes::Max(peak, Lanes::Mul(Lanes::Load(p + t), Lanes::Load(slots.most + t)));
    }
    peaks[row] = peak;
  }
  float largest[kPassRows];
  LargestOf(peaks, pass.rows, largest);
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    largest[row] = largest[row] > kSmallestPeak ? largest[row] : kSmallestPeak;
    const Lanes::F factor = Lanes::Set1(kLargestWeight / largest[row]);
    uint8_t* out = pass.weights + row * kWeightBytes;
    for (int t = first; t < last; t += 64) {
      Lanes::F scaled[4];
      for (int i = 0; i < 4; ++i) {
        scaled[i] = t + 16 * i < last ? Lanes::Mul(Lanes::Load(p + t + 16 * i), factor) : Lanes::Zero();
      }
      for (int b = 0; b < blocks; ++b) {
        const float* share = slots.share[b] + t;
        Lanes::F x[4];
        for (int i = 0; i < 4; ++i) {
          x[i] = t + 16 * i < last ? Lanes::Mul(scaled[i], Lanes::Load(share + 16 * i)) : Lanes::Zero();
        }
        Bytes16::PackUnsigned(x, out + b * weights.block_stride + t);
        prefetch.Step();
      }
    }
    const float unit = largest[row] * (scale / kLargestWeight);
    for (int b = 0; b < blocks; ++b) weights.unit[row][b] = unit * slots.largest[b];
    for (int b = 0; b < blocks; ++b) weights.zero[row][b] = 0;
    for (int b = 0; zeros && b < blocks; ++b) {
      Lanes::F zero = Lanes::Zero();
      for (int t = first; t < last; t += 16) {
        zero = Lanes::Fma(Lanes::Load(p + t), Lanes::Load(slots.zero[b] + t), zero);
      }
      weights.zero[row][b] = Lanes::Sum(zero) * scale;
    }
  }
}

// The same for the codes that share their planes.
template <class Value>
__attribute__((noinline)) void AddNarrow(const ValuePass& pass, SlotRange range, const Weights& weights, bool rescale,
                                         Prefetcher& prefetch) {
  const int first = range.begin / 4 * 4, last = static_cast<int>(RoundUp(range.end, 4));
  const uint8_t* units = pass.cell.codes + int64_t{first} * pass.cell.head_dim * Value::kBits / 8;
  AddSegment<Value>(pass, weights, {units, first, (last - first) / 4, rescale}, prefetch);
}

// Signed codes may have negative scales; the others' formats have none.
template <formats::Code kCode>
inline constexpr bool kNegativeScales = formats::Levels(kCode).level[0] < 0;

// Slots of a page that share the unit of their weights: fewer for codes of 4 bits and more, or the weights' error would
// show.
template <formats::Code kCode>
inline constexpr int kWeightRun = formats::CodeBits(kCode) > 3 ? 64 : kMaxPageTokens;

template <formats::Code kCode>
void AccumulateNarrow(const ValuePass& pass) {
  using Value = NarrowValue<NarrowCodeOf<kCode>, kNegativeScales<kCode>>;
  Prefetcher prefetch{pass.prefetch};
  SlotScales slots;
  Weights weights;
  SlotRange range{pass.begin, pass.begin};
  for (; range.begin < pass.end; range.begin = range.end) {
    const int run_end = (range.begin / kWeightRun<kCode> + 1) * kWeightRun<kCode>;
    range.end = run_end < pass.end ? run_end : pass.end;
    LoadSlots<Value::kHasScaleSigns>(pass.cell, range, Value::kMiddle, slots);
    WeighSlots(pass, range, pass.scale * kLevelUnit<kCode>, slots, weights, prefetch);
    AddNarrow<Value>(pass, range, weights, range.begin == pass.begin, prefetch);
  }
  prefetch.Rest();
}

}  // namespace
}  // namespace kvanta::kernels
