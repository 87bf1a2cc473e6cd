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
  // True for the 64 slots of most pages, for which loops over vectors are unrolled (kWhole below).
  KVANTA_INLINE bool IsWhole() const { return begin % 16 == 0 && end - begin == 64; }
};

// Calls f(i) for every vector i of a range.
template <bool kWhole, class F>
KVANTA_INLINE void ForVectors(int vectors, F f) {
  if constexpr (kWhole) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) f(i);
  } else {
    for (int i = 0; i < vectors; ++i) f(i);
  }
}

// Scales of a range of slots, split into a part per block and the share of each slot, which all rows use.
struct SlotScales {
  alignas(64) float share[kMaxBlocks][kMaxPageTokens];   // scale of a slot / largest scale of the block, without signs
  alignas(64) float offset[kMaxBlocks][kMaxPageTokens];  // value of the middle code
  alignas(64) float max_share[kMaxPageTokens];           // maximum share of a slot over all blocks
  alignas(64) uint8_t signs[kMaxBlocks * kMaxPageTokens + 64];    // [blocks][page_tokens], by Bytes16::StoreFlips()
  alignas(64) uint8_t code_offsets[kMaxBlocks * kMaxPageTokens];  // subtracted from codes, where kept (AMX)
  float largest[kMaxBlocks];
  int blocks;
};

struct NoCodeOffsets {
  static KVANTA_INLINE void Offsets(Vec16::F /*scale*/, int /*middle*/, uint8_t* /*out*/) {}
};

// Loads scales of a type into `share`, not yet divided; maxima[b]: of block b, without signs.
template <bool kWhole, bool kScaleSigns, class CodeOffsets, formats::ScaleType kType>
KVANTA_INLINE void LoadSlotsOf(const CellView& cell, SlotRange range, int midpoint, SlotScales& slots,
                               Vec16::F* maxima) {
  const int first = range.First(), vectors = (range.Last() - first) / 16;
  const bool has_blocks = static_cast<bool>(cell.block_scales);
  const uint8_t* scales = has_blocks ? cell.block_scales.data : cell.token_scales.data;
  const uint16_t* offsets = has_blocks ? cell.block_offsets : cell.token_offsets;
  const int blocks = slots.blocks, page_tokens = cell.page_tokens;
  int block_slot = first;
  for (int b = 0; b < blocks; ++b, block_slot += page_tokens) {
    Vec16::F max = Vec16::Zero();
    ForVectors<kWhole>(
        vectors, [&](int i) __attribute__((always_inline)) {
          const int t = first + 16 * i, slot = block_slot + 16 * i;
          // Scales and offsets of unused slots are undefined.
          const bool whole = kWhole || (range.begin <= t && t + 16 <= range.end);
          Vec16::F scale = LoadScalesOf<kType>(scales, slot);
          if (!whole) scale = SelectRange(scale, 0.0f, range.begin - t, range.end - t);
          if (offsets) {
            Vec16::F offset = Vec16::LoadFp16(offsets + slot);
            if (!whole) offset = SelectRange(offset, 0.0f, range.begin - t, range.end - t);
            Vec16::Store(slots.offset[b] + t, Vec16::Fma(scale, Vec16::Set1(static_cast<float>(midpoint)), offset));
          }
          if constexpr (kScaleSigns) {
            Bytes16::StoreFlips(scale, 2 * midpoint - 1, slots.signs + slot);
            CodeOffsets::Offsets(scale, midpoint, slots.code_offsets + slot);
            scale = Vec16::Abs(scale);
          }
          max = Vec16::Max(max, scale);
          Vec16::Store(slots.share[b] + t, scale);
        });
    maxima[b] = max;
  }
  for (int b = blocks; offsets && b % 4 != 0; ++b) {  // ScaleOffsets() reads four blocks at a time
    for (int i = 0; i < vectors; ++i) Vec16::Store(slots.offset[b] + first + 16 * i, Vec16::Zero());
  }
}

template <bool kWhole, bool kScaleSigns, class CodeOffsets>
__attribute__((noinline)) void LoadSlotsIn(const CellView& cell, SlotRange range, int midpoint, SlotScales& slots) {
  const int first = range.First(), vectors = (range.Last() - first) / 16;
  const int blocks = ScaleBlocks(cell);
  slots.blocks = blocks;
  Vec16::F maxima[kMaxBlocks];
  DispatchScaleType(
      cell.block_scales ? cell.block_scales : cell.token_scales, [&](auto type) __attribute__((always_inline)) {
        LoadSlotsOf<kWhole, kScaleSigns, CodeOffsets, decltype(type)::kScale>(cell, range, midpoint, slots, maxima);
      });
  // ScaleSlots() multiplies by whole vectors: leftovers that happen to be subnormal would cost it 80 cycles a row.
  static_assert(kMaxBlocks == 32);
  Vec16::Store(slots.largest, Vec16::Zero());
  if (blocks > 16) Vec16::Store(slots.largest + 16, Vec16::Zero());
  float inverse[kMaxBlocks];
  ReduceMaxima(maxima, blocks, 1, slots.largest, inverse);
  Vec16::F max_share[kWhole ? 4 : kMaxPageTokens / 16];
  ForVectors<kWhole>(
      vectors, [&](int i) __attribute__((always_inline)) { max_share[i] = Vec16::Zero(); });
  for (int b = 0; b < blocks; ++b) {
    float* shares = slots.share[b] + first;
    const Vec16::F factor = Vec16::Set1(inverse[b]);
    ForVectors<kWhole>(
        vectors, [&](int i) __attribute__((always_inline)) {
          const Vec16::F share = Vec16::Mul(Vec16::Load(shares + 16 * i), factor);
          Vec16::Store(shares + 16 * i, share);
          max_share[i] = Vec16::Max(max_share[i], share);
        });
  }
  ForVectors<kWhole>(
      vectors, [&](int i)
                   __attribute__((always_inline)) { Vec16::Store(slots.max_share + first + 16 * i, max_share[i]); });
}

// Loads four blocks of 64 whole slots, whose scales stay in registers: storing them and loading them again took a
// quarter of the time. max_share: of the blocks before, too. B: Bytes16, dependent as in PackProbs().
template <class B, bool kScaleSigns, bool kOffsets, class CodeOffsets, formats::ScaleType kType>
KVANTA_INLINE void LoadFourBlocks(const CellView& cell, int first, int midpoint, int block, SlotScales& slots,
                                  Vec16::F* max_share) {
  const uint8_t* section = cell.block_scales.data;
  const int page_tokens = cell.page_tokens;
  int block_slot = block * page_tokens + first;
  Vec16::F scales[4][4], maxima[4];
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b, block_slot += page_tokens) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int slot = block_slot + 16 * i;
      Vec16::F& scale = scales[b][i];
      scale = LoadScalesOf<kType>(section, slot);
      if constexpr (kOffsets) {
        const Vec16::F offset = Vec16::LoadFp16(cell.block_offsets + slot);
        Vec16::Store(slots.offset[block + b] + first + 16 * i,
                     Vec16::Fma(scale, Vec16::Set1(static_cast<float>(midpoint)), offset));
      }
      if constexpr (kScaleSigns) CodeOffsets::Offsets(scale, midpoint, slots.code_offsets + slot);
    }
    if constexpr (kScaleSigns) {
      B::StoreFlips64(scales[b], 2 * midpoint - 1, slots.signs + block_slot);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) scales[b][i] = Vec16::Abs(scales[b][i]);
    }
    maxima[b] = Vec16::Max(Vec16::Max(scales[b][0], scales[b][1]), Vec16::Max(scales[b][2], scales[b][3]));
  }
  float inverse[4];
  ReduceMaxima(maxima, 4, 1, slots.largest + block, inverse);
#pragma GCC unroll 4
  for (int b = 0; b < 4; ++b) {
    float* shares = slots.share[block + b] + first;
    const Vec16::F factor = Vec16::Set1(inverse[b]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Vec16::F share = Vec16::Mul(scales[b][i], factor);
      Vec16::Store(shares + 16 * i, share);
      max_share[i] = Vec16::Max(max_share[i], share);
    }
  }
}

template <bool kScaleSigns, bool kOffsets, class CodeOffsets, formats::ScaleType kType>
KVANTA_INLINE void LoadByFourBlocks(const CellView& cell, int first, int midpoint, SlotScales& slots) {
  Vec16::F max_share[4] = {Vec16::Zero(), Vec16::Zero(), Vec16::Zero(), Vec16::Zero()};
  for (int b = 0; b < slots.blocks; b += 4) {
    LoadFourBlocks<Bytes16, kScaleSigns, kOffsets, CodeOffsets, kType>(cell, first, midpoint, b, slots, max_share);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) Vec16::Store(slots.max_share + first + 16 * i, max_share[i]);
}

template <bool kScaleSigns, class CodeOffsets>
__attribute__((noinline)) void LoadWholeBlocks(const CellView& cell, int first, int midpoint, SlotScales& slots) {
  Vec16::Store(slots.largest, Vec16::Zero());
  if (slots.blocks > 16) Vec16::Store(slots.largest + 16, Vec16::Zero());
  DispatchScaleType(
      cell.block_scales, [&](auto type) __attribute__((always_inline)) {
        constexpr formats::ScaleType kType = decltype(type)::kScale;
        if (cell.block_offsets) {
          LoadByFourBlocks<kScaleSigns, true, CodeOffsets, kType>(cell, first, midpoint, slots);
        } else {
          LoadByFourBlocks<kScaleSigns, false, CodeOffsets, kType>(cell, first, midpoint, slots);
        }
      });
}

// midpoint: subtracted from codes that have offsets.
template <bool kScaleSigns, class CodeOffsets = NoCodeOffsets>
KVANTA_INLINE void LoadSlots(const CellView& cell, SlotRange range, int midpoint, SlotScales& slots) {
  if constexpr (kManyRegisters) {
    if (range.IsWhole() && cell.block_scales && ScaleBlocks(cell) % 4 == 0) {
      slots.blocks = ScaleBlocks(cell);
      return LoadWholeBlocks<kScaleSigns, CodeOffsets>(cell, range.begin, midpoint, slots);
    }
  }
  range.IsWhole() ? LoadSlotsIn<true, kScaleSigns, CodeOffsets>(cell, range, midpoint, slots)
                  : LoadSlotsIn<false, kScaleSigns, CodeOffsets>(cell, range, midpoint, slots);
}

// Sums p times the slots' offsets per row.
__attribute__((noinline)) void ScaleOffsets(const ValuePass& pass, SlotRange range, float scale,
                                            const SlotScales& slots, ScaledProbs& probs) {
  const int first = range.First(), last = range.Last(), blocks = slots.blocks;
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

// Initial sums of dots that multiply fields as they are: minus the midpoint of the codes, or minus one less for
// complements where scales are negative (kSigned), times the probabilities.
enum class InitialSums : uint8_t { kNone, kUnsigned, kSigned };

// Quantizes a row's probabilities of the `left` slots from `t` on, at most 64 and whole vectors, in all blocks:
// factor * p * share. Sets the initial sums, or, after the first slots of a range, adds to them. kWhole: 64 slots. B:
// Bytes16, dependent because not all units have its members for sums.
template <class B, bool kWhole, InitialSums kSums>
KVANTA_INLINE void PackProbs(const ValuePass& pass, const SlotScales& slots, int row, int t, int left, float factor,
                             int midpoint, bool is_first, ScaledProbs& probs) {
  const float* p = pass.p + row * kMaxPageTokens + t;
  const float* share = slots.share[0] + t;
  const uint8_t* signs = slots.signs + t;
  uint8_t* out = pass.workspace + probs.ByteOffset(row, 0, t);
  const int blocks = slots.blocks, page_tokens = pass.cell.page_tokens;
  const int64_t block_stride = probs.block_stride;
  int32_t* bias = probs.bias[row];
  Vec16::F scaled[4];
  for (int i = 0; i < 4; ++i) {
    const Vec16::F scale = Vec16::Set1(factor * B::kPackFactor[i]);
    scaled[i] = kWhole || 16 * i < left ? Vec16::Mul(Vec16::Load(p + 16 * i), scale) : Vec16::Zero();
  }
  for (int b = 0; b < blocks; b += 4) {
    [[maybe_unused]] typename B::Sum sums[4];
#pragma GCC unroll 4
    for (int of_four = 0; of_four < 4; ++of_four) {
      if constexpr (kSums != InitialSums::kNone) sums[of_four] = B::Start();
      if (b + of_four >= blocks) continue;
      Vec16::F x[4];
      for (int i = 0; i < 4; ++i) x[i] = kWhole || 16 * i < left ? Vec16::Load(share + 16 * i) : Vec16::Zero();
      B::PackProducts(scaled, x, out);  // 0 beyond the last slot
      if constexpr (kSums != InitialSums::kNone) {
        const auto offsets = B::template CodeOffsets<kSums == InitialSums::kSigned>(midpoint, signs);
        sums[of_four] = B::MulAddFields(sums[of_four], B::Load(out), offsets);
      }
      share += kMaxPageTokens;
      signs += page_tokens;
      out += block_stride;
    }
    if constexpr (kSums != InitialSums::kNone) {
      if (is_first) {
        B::template SumsOf<true>(sums, bias + b);
      } else {
        int32_t more[4];
        B::template SumsOf<true>(sums, more);
        for (int i = 0; i < 4; ++i) bias[b + i] += more[i];
      }
    }
  }
}

template <bool kWhole, InitialSums kSums>
__attribute__((noinline)) void ScaleSlotsIn(const ValuePass& pass, SlotRange range, float scale, int midpoint,
                                            const SlotScales& slots, ScaledProbs& probs, Prefetcher& prefetch) {
  const int first = range.First(), last = range.Last(), blocks = slots.blocks;
  Vec16::F maxima[kPassRows];
  for (int row = 0; row < pass.rows; ++row) {
    const float* p = pass.p + row * kMaxPageTokens;
    Vec16::F max = Vec16::Zero();
    ForVectors<kWhole>((last - first) / 16, [&](int i) __attribute__((always_inline)) {
      const int t = first + 16 * i;
      max = Vec16::Max(max, Vec16::Mul(Vec16::Load(p + t), Vec16::Load(slots.max_share + t)));
    });
    maxima[row] = max;
  }
  float largest[kPassRows], factors[kPassRows];
  ReduceMaxima(maxima, pass.rows, kMaxByteProb, largest, factors);
  for (int row = 0; row < pass.rows; ++row) {
    for (int t = first; t < last; t += 64) {
      if (kWhole || t + 64 <= last) {
        PackProbs<Bytes16, true, kSums>(pass, slots, row, t, 64, factors[row], midpoint, t == first, probs);
      } else {
        PackProbs<Bytes16, false, kSums>(pass, slots, row, t, last - t, factors[row], midpoint, t == first, probs);
      }
      for (int b = 0; b < blocks; b += 2) prefetch.Step();
    }
    const Vec16::F row_scale = Vec16::Set1(largest[row] * (scale / kMaxByteProb));
    for (int b = 0; b < blocks; b += 16) {  // by vectors: otherwise the compiler calls memset
      Vec16::Store(probs.scale[row] + b, Vec16::Mul(row_scale, Vec16::Load(slots.largest + b)));
      Vec16::Store(probs.offset[row] + b, Vec16::Zero());
    }
  }
}

// Quantizes p times the slots' scales to bytes. A row's scale is that of its largest p times a slot's maximum share, so
// p is scaled once for all blocks; the quantization step is somewhat coarser than with one scale per block. scale: of
// the side and of the code's levels. midpoint: of codes with initial sums.
template <InitialSums kSums>
KVANTA_INLINE void ScaleSlots(const ValuePass& pass, SlotRange range, float scale, int midpoint,
                              const SlotScales& slots, ScaledProbs& probs, Prefetcher& prefetch) {
  range.IsWhole() ? ScaleSlotsIn<true, kSums>(pass, range, scale, midpoint, slots, probs, prefetch)
                  : ScaleSlotsIn<false, kSums>(pass, range, scale, midpoint, slots, probs, prefetch);
  if (pass.cell.block_offsets || pass.cell.token_offsets) ScaleOffsets(pass, range, scale, slots, probs);
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

// Scales of the slot ranges that share a quantization scale, consecutive, in the workspace.
KVANTA_INLINE SlotScales* SlotsOf(const ValuePass& pass) {
  static_assert(2 * sizeof(SlotScales) <= kReusedValueScaleBytes);
  return reinterpret_cast<SlotScales*>(pass.workspace + kCallWorkspaceBytes + 2 * kReusedCodeBytes);
}

// Calls f(range, its scales) for each range of slots that share a quantization scale.
template <formats::ElementType kElementType, class F>
KVANTA_INLINE void ForSlotRanges(const ValuePass& pass, F f) {
  SlotScales* slots = SlotsOf(pass);
  SlotRange range{pass.begin, pass.begin};
  for (; range.begin < pass.end; range.begin = range.end, ++slots) {
    range.end = EndOfScale<kElementType>(range.begin, pass.end);
    f(range, *slots);
  }
}

template <formats::ElementType kElementType>
using SubbyteValueOf = SubbyteValue<SubbyteTypeOf<kElementType>, kNegativeScales<kElementType>>;

template <formats::ElementType kElementType>
void LoadSubbyte(const ValuePass& pass) {
  using Value = SubbyteValueOf<kElementType>;
  if (pass.workspace_use == WorkspaceUse::kReuse) return;
  ForSlotRanges<kElementType>(
      pass, [&](SlotRange range, SlotScales & slots) __attribute__((always_inline)) {
        LoadSlots<Value::kHasScaleSigns>(pass.cell, range, Value::kMiddle, slots);
      });
}

template <formats::ElementType kElementType>
void AccumulateSubbyte(const ValuePass& pass) {
  using Value = SubbyteValueOf<kElementType>;
  constexpr InitialSums kSums = !Value::kHasInitialSums ? InitialSums::kNone
                                : Value::kHasScaleSigns ? InitialSums::kSigned
                                                        : InitialSums::kUnsigned;
  const int blocks = ScaleBlocks(pass.cell);
  const int tokens = pass.end - pass.begin;
  Prefetcher prefetch{pass.prefetch,
                      pass.rows * ((blocks + 1) / 2) * ((tokens + 63) / 64) + AddSteps<Value>(pass, tokens / 4)};
  ScaledProbs probs;
  probs.Place(pass.workspace, kProbRowBytes<1>, kPassRows * kProbRowBytes<1>, 64);
  probs.SetBlocks(pass.cell);
  ForSlotRanges<kElementType>(
      pass, [&](SlotRange range, SlotScales & slots) __attribute__((always_inline)) {
        probs.signs = slots.signs;
        ScaleSlots<kSums>(pass, range, pass.scale * kLevelScale<kElementType>, Value::kMiddle, slots, probs, prefetch);
        AddSubbyte<Value>(pass, range, probs, range.begin == pass.begin, prefetch);
      });
}

}  // namespace
}  // namespace kvanta::kernels
