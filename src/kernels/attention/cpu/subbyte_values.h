// PV kernels of sub-byte codes (subbyte_codes.h); included by isa_<isa>.cc after subbyte_keys.h.
#pragma once

#include <cstdint>

#include "formats/element_type.h"
#include "kernels/attention/cpu/subbyte_codes.h"
#include "kernels/attention/cpu/subbyte_keys.h"
#include "kernels/attention/cpu/values.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

// Slots [begin, end) of a page whose scaled probabilities share a quantization scale. Passed apart from ValuePass: a
// modified copy of the whole struct would stall store forwarding.
struct SlotRange {
  int begin;
  int end;

  // Rounded to whole vectors.
  KVANTA_INLINE int First() const { return begin / 16 * 16; }
  KVANTA_INLINE int Last() const { return static_cast<int>(RoundUp(end, 16)); }
};

// Scales of a range of slots, split into a part per block and the share of each slot, which all rows use.
struct SlotScales {
  alignas(64) float share[kMaxBlocks][kMaxPageTokens];   // scale of a slot / largest scale of the block, without signs
  alignas(64) float offset[kMaxBlocks][kMaxPageTokens];  // value of the middle code
  alignas(64) float max_share[kMaxPageTokens];           // maximum share of a slot over all blocks
  alignas(64) uint8_t signs[kMaxBlocks * kMaxPageTokens + 64];    // [blocks][page_tokens], by Bytes16::Signs()
  alignas(64) uint8_t code_offsets[kMaxBlocks * kMaxPageTokens];  // subtracted from codes, where kept (AMX)
  float largest[kMaxBlocks];
};

struct NoCodeOffsets {
  static KVANTA_INLINE void Offsets(Vec16::F /*scale*/, int /*middle*/, uint8_t* /*out*/) {}
};

// Loads scales of a type into `share`, not yet divided; maxima[b]: of block b, without signs.
template <bool kScaleSigns, class CodeOffsets, formats::ScaleType kType>
KVANTA_INLINE void LoadSlotsOf(const CellView& cell, SlotRange range, int midpoint, SlotScales& slots,
                               Vec16::F* maxima) {
  const int first = range.First(), last = range.Last();
  const bool has_blocks = static_cast<bool>(cell.block_scales);
  const uint8_t* scales = has_blocks ? cell.block_scales.data : cell.token_scales.data;
  const uint16_t* offsets = has_blocks ? cell.block_offsets : cell.token_offsets;
  const int blocks = ScaleBlocks(cell);
  for (int b = 0; b < blocks; ++b) {
    Vec16::F max = Vec16::Zero();
    for (int t = first; t < last; t += 16) {
      const int slot = b * cell.page_tokens + t;
      // Scales and offsets of unused slots are undefined.
      const bool whole = range.begin <= t && t + 16 <= range.end;
      Vec16::F scale = LoadScalesOf<kType>(scales, slot);
      if (!whole) scale = SelectRange(scale, 0.0f, range.begin - t, range.end - t);
      if (offsets) {
        Vec16::F offset = Vec16::LoadFp16(offsets + slot);
        if (!whole) offset = SelectRange(offset, 0.0f, range.begin - t, range.end - t);
        Vec16::Store(slots.offset[b] + t, Vec16::Fma(scale, Vec16::Set1(static_cast<float>(midpoint)), offset));
      }
      if constexpr (kScaleSigns) {
        Bytes16::Signs(scale, 2 * midpoint - 1, slots.signs + slot);
        CodeOffsets::Offsets(scale, midpoint, slots.code_offsets + slot);
        scale = Vec16::Abs(scale);
      }
      max = Vec16::Max(max, scale);
      Vec16::Store(slots.share[b] + t, scale);
    }
    maxima[b] = max;
  }
  for (int b = blocks; offsets && b % 4 != 0; ++b) {  // ScaleOffsets() reads four blocks at a time
    for (int t = first; t < last; t += 16) Vec16::Store(slots.offset[b] + t, Vec16::Zero());
  }
}

// midpoint: subtracted from codes that have offsets.
template <bool kScaleSigns, class CodeOffsets = NoCodeOffsets>
__attribute__((noinline)) void LoadSlots(const CellView& cell, SlotRange range, int midpoint, SlotScales& slots) {
  const int first = range.First(), last = range.Last();
  const int blocks = ScaleBlocks(cell);
  Vec16::F maxima[kMaxBlocks];
  DispatchScaleType(
      cell.block_scales ? cell.block_scales : cell.token_scales, [&](auto type) __attribute__((always_inline)) {
        LoadSlotsOf<kScaleSigns, CodeOffsets, decltype(type)::kScale>(cell, range, midpoint, slots, maxima);
      });
  // ScaleSlots() multiplies by whole vectors: leftovers that happen to be subnormal would cost it 80 cycles a row.
  for (int b = 0; b < blocks; b += 16) Vec16::Store(slots.largest + b, Vec16::Zero());
  float inverse[kMaxBlocks];
  ReduceMaxima(maxima, blocks, 1, slots.largest, inverse);
  for (int t = first; t < last; t += 16) {
    Vec16::F max_share = Vec16::Zero();
    for (int b = 0; b < blocks; ++b) {
      const Vec16::F share = Vec16::Mul(Vec16::Load(slots.share[b] + t), Vec16::Set1(inverse[b]));
      Vec16::Store(slots.share[b] + t, share);
      max_share = Vec16::Max(max_share, share);
    }
    Vec16::Store(slots.max_share + t, max_share);
  }
}

// Sets the initial sums: minus the midpoint of the codes, or minus one less for complements where scales are negative,
// times the probabilities.
template <bool kScaleSigns, class B>
KVANTA_INLINE void SetInitialSums(const ValuePass& pass, SlotRange range, int midpoint, const SlotScales& slots,
                                  ScaledProbs& probs) {
  const int blocks = ScaleBlocks(pass.cell);
  for (int b = 0; b < blocks; ++b) {
    for (int row = 0; row < pass.rows; row += 4) {  // rows beyond the last are computed but never read
      typename B::Sum sums[4] = {B::Start(), B::Start(), B::Start(), B::Start()};
      for (int t = range.First(); t < range.Last(); t += 64) {
        const auto code_offsets = B::template CodeOffsets<kScaleSigns>(
            midpoint, slots.signs + b * pass.cell.page_tokens + t, range.Last() - t);
        const uint8_t* operands = pass.workspace + probs.ByteOffset(row, b, t);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          sums[i] = B::MulAddFields(sums[i], B::Load(operands + i * kProbRowBytes<1>), code_offsets);
        }
      }
      int32_t excess[4];
      B::SumsOf(sums, excess);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) probs.bias[row + i][b] = -excess[i];
    }
  }
}

// Quantizes a row's probabilities of up to 64 slots in all blocks: factor * p * share. Not inlined because it needs all
// registers. kWhole: all 64 slots, else `left` of them, whole vectors.
template <bool kWhole>
__attribute__((noinline)) void PackProbs(const float* p, float factor, const float* share, int left, int blocks,
                                         uint8_t* out, int64_t block_stride) {
  Vec16::F scaled[4];
  for (int i = 0; i < 4; ++i) {
    const Vec16::F scale = Vec16::Set1(factor * Bytes16::kPackFactor[i]);
    scaled[i] = kWhole || 16 * i < left ? Vec16::Mul(Vec16::Load(p + 16 * i), scale) : Vec16::Zero();
  }
  for (int b = 0; b < blocks; ++b, share += kMaxPageTokens, out += block_stride) {
    Vec16::F x[4];
    for (int i = 0; i < 4; ++i) x[i] = kWhole || 16 * i < left ? Vec16::Load(share + 16 * i) : Vec16::Zero();
    Bytes16::PackProducts(scaled, x, out);
  }
}

// Sums p times the slots' offsets per row.
__attribute__((noinline)) void ScaleOffsets(const ValuePass& pass, SlotRange range, float scale,
                                            const SlotScales& slots, ScaledProbs& probs) {
  const int first = range.First(), last = range.Last(), blocks = ScaleBlocks(pass.cell);
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    for (int b = 0; b < blocks; b += 4) {  // blocks beyond the last are zero
      Vec16::F offsets[4] = {Vec16::Zero(), Vec16::Zero(), Vec16::Zero(), Vec16::Zero()};
      for (int t = first; t < last; t += 16) {
        const Vec16::F prob = Vec16::Load(p + t);
        for (int i = 0; i < 4; ++i) offsets[i] = Vec16::Fma(prob, Vec16::Load(slots.offset[b + i] + t), offsets[i]);
      }
      float sums[4];
      Vec16::SumsOf(offsets, sums);
      for (int i = 0; i < 4; ++i) probs.offset[row][b + i] = sums[i] * scale;
    }
  }
}

// Quantizes p times the slots' scales to bytes. A row's scale is that of its largest p times a slot's maximum share, so
// p is scaled once for all blocks; the quantization step is somewhat coarser than with one scale per block. scale: of
// the side and of the code's levels.
__attribute__((noinline)) void ScaleSlots(const ValuePass& pass, SlotRange range, float scale, const SlotScales& slots,
                                          ScaledProbs& probs, Prefetcher& prefetch) {
  const int first = range.First(), last = range.Last();
  const CellView& cell = pass.cell;
  const int blocks = ScaleBlocks(cell);
  Vec16::F maxima[kPassRows];
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    Vec16::F max = Vec16::Zero();
    for (int t = first; t < last; t += 16) {
      max = Vec16::Max(max, Vec16::Mul(Vec16::Load(p + t), Vec16::Load(slots.max_share + t)));
    }
    maxima[row] = max;
  }
  float largest[kPassRows], factors[kPassRows];
  ReduceMaxima(maxima, pass.rows, kMaxByteProb, largest, factors);
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    const float factor = factors[row];
    for (int t = first; t < last; t += 64) {
      uint8_t* out = pass.workspace + probs.ByteOffset(row, 0, t);
      if (t + 64 <= last) {
        PackProbs<true>(p + t, factor, slots.share[0] + t, 64, blocks, out, probs.block_stride);
      } else {
        PackProbs<false>(p + t, factor, slots.share[0] + t, last - t, blocks, out, probs.block_stride);
      }
      for (int b = 0; b < blocks; b += 2) prefetch.Step();
    }
    const Vec16::F row_scale = Vec16::Set1(largest[row] * (scale / kMaxByteProb));
    for (int b = 0; b < blocks; b += 16) {  // by vectors: otherwise the compiler calls memset
      Vec16::Store(probs.scale[row] + b, Vec16::Mul(row_scale, Vec16::Load(slots.largest + b)));
      Vec16::Store(probs.offset[row] + b, Vec16::Zero());
    }
  }
  if (cell.block_offsets != nullptr || cell.token_offsets != nullptr) ScaleOffsets(pass, range, scale, slots, probs);
}

// Accumulates a range of slots. One instance for the codes that share a layout of sections.
template <class Value>
__attribute__((noinline)) void AddSubbyte(const ValuePass& pass, SlotRange range, const ScaledProbs& probs,
                                          bool rescale, Prefetcher& prefetch) {
  const int first = range.begin / 4 * 4, last = static_cast<int>(RoundUp(range.end, 4));
  const uint8_t* words = pass.cell.codes + int64_t{first} * pass.cell.head_dim * Value::kBits / 8;
  AddTokenRange<Value>(pass, probs, {words, first, (last - first) / 4, rescale}, prefetch);
}

// Only formats of signed codes may have negative scales.
template <formats::ElementType kElementType>
inline constexpr bool kNegativeScales = formats::Levels(kElementType).level[0] < 0;

template <formats::ElementType kElementType>
void AccumulateSubbyte(const ValuePass& pass) {
  using Value = SubbyteValue<SubbyteTypeOf<kElementType>, kNegativeScales<kElementType>>;
  const int blocks = ScaleBlocks(pass.cell);
  const int tokens = pass.end - pass.begin;
  Prefetcher prefetch{pass.prefetch,
                      pass.rows * ((blocks + 1) / 2) * ((tokens + 63) / 64) + AddSteps<Value>(pass, tokens / 4)};
  SlotScales slots;
  ScaledProbs probs;
  probs.Place(pass.workspace, kProbRowBytes<1>, kPassRows * kProbRowBytes<1>, 64);
  probs.SetBlocks(pass.cell);
  probs.signs = slots.signs;
  SlotRange range{pass.begin, pass.begin};
  for (; range.begin < pass.end; range.begin = range.end) {
    range.end = EndOfScale<kElementType>(range.begin, pass.end);
    LoadSlots<Value::kHasScaleSigns>(pass.cell, range, Value::kMiddle, slots);
    ScaleSlots(pass, range, pass.scale * kLevelScale<kElementType>, slots, probs, prefetch);
    if constexpr (Value::kHasInitialSums)
      SetInitialSums<Value::kHasScaleSigns, Bytes16>(pass, range, Value::kMiddle, slots, probs);
    AddSubbyte<Value>(pass, range, probs, range.begin == pass.begin, prefetch);
  }
}

}  // namespace
}  // namespace kvanta::kernels
