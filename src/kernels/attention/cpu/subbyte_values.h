// The attention kernels of values in narrow codes (codes_narrow.h); included by isa_<isa>.cc after attention_narrow.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/subbyte_codes.h"
#include "kernels/attention/cpu/kernels.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

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
  alignas(64) float share[kMaxBlocks][kMaxPageTokens];          // of the block's largest, without signs
  alignas(64) float zero[kMaxBlocks][kMaxPageTokens];           // of the code that values are met less
  alignas(64) float limit[kMaxPageTokens];                      // largest share of a slot
  alignas(64) uint8_t signs[kMaxBlocks * kMaxPageTokens + 64];  // [blocks][page_tokens], as Bytes16 writes them
  alignas(64) uint8_t offsets[kMaxBlocks * kMaxPageTokens];     // what codes are met less, where they are kept
  float largest[kMaxBlocks];
};

// largest[i]: the largest lane of peaks[i]; both have room for a multiple of 4.
KVANTA_INLINE void LargestOf(Vec16::F* argmaxes, int count, float* largest) {
  for (int i = count; i % 4 != 0; ++i) argmaxes[i] = Vec16::Zero();
  for (int i = 0; i < count; i += 4) Vec16::MaximaOf(argmaxes + i, largest + i);
}

struct KeepNoOffsets {
  static KVANTA_INLINE void Offsets(Vec16::F /*scale*/, int /*middle*/, uint8_t* /*out*/) {}
};

// Scales of a type, into `share` as they are; peaks[b]: of block b without signs.
template <bool kScaleSigns, class Keep, formats::ScaleType kType>
KVANTA_INLINE void LoadSlotsOf(const CellView& cell, SlotRange range, int middle, SlotScales& slots,
                               Vec16::F* argmaxes) {
  const int first = range.First(), last = range.Last();
  const bool in_blocks = static_cast<bool>(cell.block_scales);
  const uint8_t* scales = in_blocks ? cell.block_scales.data : cell.token_scales.data;
  const uint16_t* zeros = in_blocks ? cell.block_offsets : cell.token_offsets;
  const int blocks = ScaleBlocks(cell);
  for (int b = 0; b < blocks; ++b) {
    Vec16::F max_value = Vec16::Zero();
    for (int t = first; t < last; t += 16) {
      const int slot = b * cell.page_tokens + t;
      // Scales and zeros of unused slots may be anything.
      const bool whole = range.begin <= t && t + 16 <= range.end;
      Vec16::F scale = LoadScalesOf<kType>(scales, slot);
      if (!whole) scale = KeepOr(scale, 0.0f, range.begin - t, range.end - t);
      if (zeros) {
        Vec16::F zero = Vec16::LoadFp16(zeros + slot);
        if (!whole) zero = KeepOr(zero, 0.0f, range.begin - t, range.end - t);
        Vec16::Store(slots.zero[b] + t, Vec16::Fma(scale, Vec16::Set1(static_cast<float>(middle)), zero));
      }
      if constexpr (kScaleSigns) {
        Bytes16::Signs(scale, 2 * middle - 1, slots.signs + slot);
        Keep::Offsets(scale, middle, slots.offsets + slot);
        scale = Vec16::Abs(scale);
      }
      max_value = Vec16::Max(max_value, scale);
      Vec16::Store(slots.share[b] + t, scale);
    }
    argmaxes[b] = max_value;
  }
}

// `middle`: the code that values with zeros are met less.
template <bool kScaleSigns, class Keep = KeepNoOffsets>
__attribute__((noinline)) void LoadSlots(const CellView& cell, SlotRange range, int middle, SlotScales& slots) {
  const int first = range.First(), last = range.Last();
  const int blocks = ScaleBlocks(cell);
  Vec16::F argmaxes[kMaxBlocks];
  ForTypeOf(
      cell.block_scales ? cell.block_scales : cell.token_scales, [&](auto type) __attribute__((always_inline)) {
        LoadSlotsOf<kScaleSigns, Keep, decltype(type)::kScale>(cell, range, middle, slots, argmaxes);
      });
  for (int b = blocks; b % 4 != 0; ++b) argmaxes[b] = Vec16::Zero();
  float inverse[kMaxBlocks];
  for (int b = 0; b < blocks; b += 4) {  // by four: what MaximaOf() stores is loaded as it was stored, without a wait
    float largest[4];
    Vec16::MaximaOf(argmaxes + b, largest);
    for (int i = 0; i < 4; ++i) largest[i] = largest[i] > kSmallestMax ? largest[i] : kSmallestMax;
    for (int i = 0; i < 4; ++i) inverse[b + i] = 1 / largest[i];
    __builtin_memcpy(slots.largest + b, largest, sizeof largest);
  }
  for (int t = first; t < last; t += 16) {
    Vec16::F limit = Vec16::Zero();
    for (int b = 0; b < blocks; ++b) {
      const Vec16::F part = Vec16::Mul(Vec16::Load(slots.share[b] + t), Vec16::Set1(inverse[b]));
      Vec16::Store(slots.share[b] + t, part);
      limit = Vec16::Max(limit, part);
    }
    Vec16::Store(slots.limit + t, limit);
  }
}

// What sums start from: what codes are to be met less, which is one less of their complements where scales are
// negative.
template <bool kScaleSigns, class B>
KVANTA_INLINE void StartSums(const ValuePass& pass, SlotRange range, int middle, const SlotScales& slots,
                             ScaledProbs& probs) {
  const int blocks = ScaleBlocks(pass.cell);
  for (int b = 0; b < blocks; ++b) {
    for (int row = 0; row < pass.rows; row += 4) {
      typename B::Sum sums[4] = {B::Start(), B::Start(), B::Start(), B::Start()};
      for (int t = range.First(); t < range.Last(); t += 64) {
        const auto offsets =
            B::template Offsets<kScaleSigns>(middle, slots.signs + b * pass.cell.page_tokens + t, range.Last() - t);
        for (int i = 0; i < 4 && row + i < pass.rows; ++i) {
          sums[i] = B::MulAddSigned(sums[i], B::Load(pass.workspace + probs.Offset(row + i, b, t)), offsets);
        }
      }
      int32_t too_much[4];
      B::SumsOf(sums, too_much);
      for (int i = 0; i < 4 && row + i < pass.rows; ++i) probs.bias[row + i][b] = -too_much[i];
    }
  }
}

// A row's weights of up to 64 slots in all blocks: `factor` times p times the slots' shares. Not inlined: it needs the
// registers. kWhole: all 64, else `left` of them, whole vectors.
template <bool kWhole>
__attribute__((noinline)) void PackWeights(const float* p, float factor, const float* share, int left, int blocks,
                                           uint8_t* out, int64_t block_stride) {
  Vec16::F scaled[4];
  for (int i = 0; i < 4; ++i) {
    const Vec16::F unit = Vec16::Set1(factor * Bytes16::kPackFactor[i]);
    scaled[i] = kWhole || 16 * i < left ? Vec16::Mul(Vec16::Load(p + 16 * i), unit) : Vec16::Zero();
  }
  for (int b = 0; b < blocks; ++b, share += kMaxPageTokens, out += block_stride) {
    Vec16::F x[4];
    for (int i = 0; i < 4; ++i) x[i] = kWhole || 16 * i < left ? Vec16::Load(share + 16 * i) : Vec16::Zero();
    Bytes16::PackProducts(scaled, x, out);
  }
}

// The rows' sums of p times the slots' zeros.
__attribute__((noinline)) void ScaleOffsets(const ValuePass& pass, SlotRange range, float scale,
                                            const SlotScales& slots, ScaledProbs& probs) {
  const int first = range.First(), last = range.Last(), blocks = ScaleBlocks(pass.cell);
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    for (int b = 0; b < blocks; b += 4) {  // those behind the last are numbers that nothing reads
      Vec16::F zeros[4] = {Vec16::Zero(), Vec16::Zero(), Vec16::Zero(), Vec16::Zero()};
      for (int t = first; t < last; t += 16) {
        const Vec16::F weight = Vec16::Load(p + t);
        for (int i = 0; i < 4; ++i) zeros[i] = Vec16::Fma(weight, Vec16::Load(slots.zero[b + i] + t), zeros[i]);
      }
      float sums[4];
      Vec16::SumsOf(zeros, sums);
      for (int i = 0; i < 4; ++i) probs.zero[row][b + i] = sums[i] * scale;
    }
  }
}

// p times the slots' scales as bytes. A row's unit is that of its largest p times a slot's largest share, so its p are
// scaled once for all blocks; units are somewhat larger than if each block had its own.
// scale: of the side and of the code's levels; `weights`: where they go.
__attribute__((noinline)) void ScaleSlots(const ValuePass& pass, SlotRange range, float scale, const SlotScales& slots,
                                          ScaledProbs& probs, Prefetcher& prefetch) {
  const int first = range.First(), last = range.Last();
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  Vec16::F argmaxes[kPassRows];
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    Vec16::F max_value = Vec16::Zero();
    for (int t = first; t < last; t += 16) {
      max_value = Vec16::Max(max_value, Vec16::Mul(Vec16::Load(p + t), Vec16::Load(slots.limit + t)));
    }
    argmaxes[row] = max_value;
  }
  float largest[kPassRows];
  LargestOf(argmaxes, pass.rows, largest);
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    largest[row] = largest[row] > kSmallestMax ? largest[row] : kSmallestMax;
    const float factor = kLargestScaledProb / largest[row];
    for (int t = first; t < last; t += 64) {
      uint8_t* out = pass.workspace + probs.Offset(row, 0, t);
      if (t + 64 <= last) {
        PackWeights<true>(p + t, factor, slots.share[0] + t, 64, blocks, out, probs.block_stride);
      } else {
        PackWeights<false>(p + t, factor, slots.share[0] + t, last - t, blocks, out, probs.block_stride);
      }
      for (int b = 0; b < blocks; b += 2) prefetch.Step();
    }
    const Vec16::F unit = Vec16::Set1(largest[row] * (scale / kLargestScaledProb));
    for (int b = 0; b < blocks; b += 16) {  // by vectors, or the compiler calls memset
      Vec16::Store(probs.unit[row] + b, Vec16::Mul(unit, Vec16::Load(slots.largest + b)));
      Vec16::Store(probs.zero[row] + b, Vec16::Zero());
    }
  }
  if (cell.block_offsets != nullptr || cell.token_offsets != nullptr) ScaleOffsets(pass, range, scale, slots, probs);
}

// The same for the codes that share their planes.
template <class Value>
__attribute__((noinline)) void AddSubbyte(const ValuePass& pass, SlotRange range, const ScaledProbs& probs,
                                          bool rescale, Prefetcher& prefetch) {
  const int first = range.begin / 4 * 4, last = static_cast<int>(RoundUp(range.end, 4));
  const uint8_t* units = pass.cell.codes + int64_t{first} * pass.cell.head_dim * Value::kBits / 8;
  AddTokenRange<Value>(pass, probs, {units, first, (last - first) / 4, rescale}, prefetch);
}

// Signed codes may have negative scales; the others' formats have none.
template <formats::ElementType kElementType>
inline constexpr bool kNegativeScales = formats::Levels(kElementType).level[0] < 0;

// Slots of a page that share the unit of their weights: fewer for codes of 4 bits and more, or the weights' error would
// show.
template <formats::ElementType kElementType>
inline constexpr int kWeightRun = formats::CodeBits(kElementType) > 3 ? 64 : kMaxPageTokens;

template <formats::ElementType kElementType>
void AccumulateSubbyte(const ValuePass& pass) {
  using Value = SubbyteValue<SubbyteTypeOf<kElementType>, kNegativeScales<kElementType>>;
  const int blocks = ScaleBlocks(pass.cell);
  const int tokens = pass.end - pass.begin;
  Prefetcher prefetch{pass.prefetch,
                      pass.rows * ((blocks + 1) / 2) * ((tokens + 63) / 64) + AddSteps<Value>(pass, tokens / 4)};
  SlotScales slots;
  ScaledProbs probs;
  probs.Place(pass.workspace, kWeightBytes, pass.cell.page_tokens, 64);
  probs.signs = slots.signs;
  SlotRange range{pass.begin, pass.begin};
  for (; range.begin < pass.end; range.begin = range.end) {
    const int run_end = (range.begin / kWeightRun<kElementType> + 1) * kWeightRun<kElementType>;
    range.end = run_end < pass.end ? run_end : pass.end;
    LoadSlots<Value::kHasScaleSigns>(pass.cell, range, Value::kMiddle, slots);
    ScaleSlots(pass, range, pass.scale * kLevelUnit<kElementType>, slots, probs, prefetch);
    if constexpr (Value::kStarts) StartSums<Value::kHasScaleSigns, Bytes16>(pass, range, Value::kMiddle, slots, probs);
    AddSubbyte<Value>(pass, range, probs, range.begin == pass.begin, prefetch);
  }
}

}  // namespace
}  // namespace kvanta::kernels
