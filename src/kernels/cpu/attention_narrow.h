// The attention kernels of narrow codes (codes_narrow.h), and of keys with a scale and a zero per channel; included by
// isa_<isa>.cc after attention_kernels.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_kernels.h"
#include "kernels/cpu/codes_narrow.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

template <formats::Code kCode>
float PrepareNarrow(const float* query, int head_dim, int block, uint8_t* out) {
  return PrepareFor<NarrowQuery>(query, head_dim, block, NarrowLevelsOf(kCode).offset, out) *
         formats::Levels(kCode).unit;
}

// ---- keys with a scale and a zero per channel: prepared queries are f32, and become coefficients tile by tile

inline int64_t TiledQueryBytes(int head_dim) {
  return RoundUp(int64_t{4} * head_dim, 64);
}

inline float PrepareTiled(const float* query, int head_dim, int /*block*/, uint8_t* out) {
  __builtin_memcpy(out, query, sizeof(float) * static_cast<size_t>(head_dim));
  return 1.0f;
}

// One row's query for one tile: coefficients of q * scale; returns <q, zero>. The zero meets the query as it is, so it
// is taken in the middle of the codes: far from it, codes would multiply what the coefficients lost.
template <formats::Code kCode>
KVANTA_INLINE float ScaleQuery(const float* query, const uint16_t* scales, const uint16_t* zeros, int head_dim,
                               uint8_t* out, float& factor) {
  constexpr int kMiddle = 1 << (formats::CodeBits(kCode) - 1);
  alignas(64) float x[kMaxHeadDim];
  Lanes::F sum = Lanes::Zero();
  const auto add = [&](int c, Lanes::F q, Lanes::F scale, Lanes::F zero) {
    sum = Lanes::Fma(q, Lanes::Fma(Lanes::Set1(kMiddle), scale, zero), sum);
    Lanes::Store(x + c, Lanes::Mul(q, scale));
  };
  for (int c = 0; c < head_dim; c += 16) {
    if (c + 16 <= head_dim) {
      add(c, Lanes::Load(query + c), Lanes::LoadFp16(scales + c), Lanes::LoadFp16(zeros + c));
    } else {  // the last 8 channels: fp16 is read by 16, so from a copy
      uint16_t scale[16] = {}, zero[16] = {};
      __builtin_memcpy(scale, scales + c, 16);
      __builtin_memcpy(zero, zeros + c, 16);
      add(c, Lanes::LoadTail(query + c, 8), Lanes::LoadFp16(scale), Lanes::LoadFp16(zero));
    }
  }
  factor = PrepareFor<NarrowQuery>(x, head_dim, 0, kMiddle, out);
  return Lanes::Sum(sum);
}

template <formats::Code kCode>
void ScoreTiled(const KeyPass& pass) {
  using Key = NarrowKey<NarrowCodeOf<kCode>>;
  constexpr int64_t kMostBytes = RoundUp(int64_t{kMaxHeadDim} * Key::kCoefficientBytes, 64) + 8 * kMaxBlocks;
  alignas(64) uint8_t queries[kPassRows * kMostBytes];
  float factors[kPassRows], zeros[kPassRows];
  const CellView& cell = pass.cell;
  const int groups_of_tile = cell.tile / 16;
  const int64_t group_bytes = int64_t{cell.head_dim} * Key::kBits * 2;
  KeyPass tile_pass = pass;
  tile_pass.query = queries;
  tile_pass.query_stride = QueryBytes<Key>(cell.head_dim);
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
      ScoreGroup<Key>(tile_pass, cell.codes + group * group_bytes, group, prefetch);
      for (int row = 0; row < pass.rows; ++row) {
        float* scores = pass.scores + row * kMaxPageTokens + group * 16;
        Lanes::Store(scores, Lanes::Add(Lanes::Load(scores), Lanes::Set1(zeros[row])));
      }
    }
  }
  prefetch.Rest();
}

// ---- PV

// Weigh() of a run of 16 kVectors slots, whose weights stay in registers until they are rounded.
template <int kVectors>
KVANTA_INLINE void WeighRun(const ValuePass& pass, int first, int offset, Weights& weights) {
  const CellView& cell = pass.cell;
  const bool in_blocks = static_cast<bool>(cell.block_scales);
  const ScalePlane& scales = in_blocks ? cell.block_scales : cell.token_scales;
  const uint16_t* zeros = in_blocks ? cell.block_zeros : cell.token_zeros;
  const bool whole = pass.begin <= first && first + 16 * kVectors <= pass.end;
  weights.rows = pass.weights;
  weights.row_stride = kWeightBytes;
  weights.block_stride = cell.page_tokens;
  for (int b = 0; b * (in_blocks ? cell.block : cell.head_dim) < cell.head_dim; ++b) {
    Lanes::F scale[kVectors], level[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int slot = b * cell.page_tokens + first + 16 * v;
      scale[v] = scales ? LoadScales(scales, slot) : Lanes::Set1(1);
      level[v] = zeros ? Lanes::LoadFp16(zeros + slot) : Lanes::Zero();
    }
    for (int row = 0; row < pass.rows; ++row) {
      Lanes::F x[kVectors];
      Lanes::F peak = Lanes::Zero(), zero = Lanes::Zero(), total = Lanes::Zero();
      for (int v = 0; v < kVectors; ++v) {
        const int t = first + 16 * v;
        const Lanes::F p = Lanes::Mul(Lanes::Load(pass.p + row * kMaxPageTokens + t), Lanes::Set1(pass.scale));
        x[v] = Lanes::Mul(p, scale[v]);
        if (zeros) {
          Lanes::F z = Lanes::Fma(x[v], Lanes::Set1(static_cast<float>(offset)), Lanes::Mul(p, level[v]));
          if (!whole) z = KeepOr(z, 0.0f, pass.begin - t, pass.end - t);
          zero = Lanes::Add(zero, z);
        }
        if (!whole) x[v] = KeepOr(x[v], 0.0f, pass.begin - t, pass.end - t);
        peak = Lanes::Max(peak, Magnitude(x[v]));
      }
      const Quantizer quantizer = QuantizerOf<NarrowWeights>(peak);
      uint8_t* out = pass.weights + row * kWeightBytes + b * weights.block_stride + first;
      for (int v = 0; v < kVectors; ++v) {
        const Lanes::F value = Lanes::Round(Lanes::Mul(x[v], Lanes::Set1(quantizer.inverse)));
        total = Lanes::Add(total, value);
        NarrowWeights::Pack(value, out + 16 * v);
      }
      weights.unit[row][b] = quantizer.unit;
      weights.zero[row][b] = zeros ? Lanes::Sum(zero) : 0.0f;
      weights.bias[row][b] = offset == 0 ? 0 : Bias(Lanes::Sum(total), offset);
    }
  }
}

// One function for all codes, as its instructions are the same.
__attribute__((noinline)) void WeighNarrow(const ValuePass& pass, int offset, Weights& weights) {
  const int first = pass.begin / 16 * 16, last = static_cast<int>(RoundUp(pass.end, 16));
  if (last - first == 32) return WeighRun<2>(pass, first, offset, weights);
  if (last - first == 16) return WeighRun<1>(pass, first, offset, weights);
  Weigh<NarrowWeights>(pass, offset, weights);
}

// The same for the codes that share their planes.
template <class Value>
__attribute__((noinline)) void AddNarrow(const ValuePass& pass, const Weights& weights, bool rescale) {
  Prefetcher prefetch{pass.prefetch.next, pass.prefetch.end};
  const int first = pass.begin / 4 * 4, last = static_cast<int>(RoundUp(pass.end, 4));
  const uint8_t* units = pass.cell.codes + int64_t{first} * pass.cell.head_dim * Value::kBits / 8;
  AddSegment<Value>(pass, weights, {units, first, (last - first) / 4, rescale}, prefetch);
  prefetch.Rest();
}

// Zeros meet the weights as they are, so they are taken in the middle of the codes, as keys' are.
template <formats::Code kCode>
KVANTA_INLINE int ValueOffset(const CellView& cell) {
  const bool zeros = cell.block_zeros != nullptr || cell.token_zeros != nullptr;
  return zeros ? 1 << (formats::CodeBits(kCode) - 1) : NarrowLevelsOf(kCode).offset;
}

// Slots of a page that share the unit of their weights: fewer for codes of 4 bits and more, or the weights' error would
// show.
template <formats::Code kCode>
inline constexpr int kWeightRun = formats::CodeBits(kCode) > 3 ? 32 : kMaxPageTokens;

template <formats::Code kCode>
void AccumulateNarrow(const ValuePass& pass) {
  Weights weights;
  ValuePass part = pass;
  part.scale *= formats::Levels(kCode).unit;
  for (int begin = pass.begin; begin < pass.end; begin = part.end) {
    const int run_end = (begin / kWeightRun<kCode> + 1) * kWeightRun<kCode>;
    part.begin = begin;
    part.end = run_end < pass.end ? run_end : pass.end;
    WeighNarrow(part, ValueOffset<kCode>(pass.cell), weights);
    AddNarrow<NarrowValue<NarrowCodeOf<kCode>>>(part, weights, begin == pass.begin);
    part.prefetch = {};  // once is enough
  }
}

}  // namespace
}  // namespace kvanta::kernels
