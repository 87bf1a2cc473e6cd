// K/V types of the attention kernels: StaticKvType (a compile-time format) or RuntimeKvType (a decode kind whose widths
// and scales are launch arguments). Both have the same interface, so kernels are written once. Include the primitives
// first.
#pragma once

#include <algorithm>

#include "formats/element_type.h"
#include "formats/format_traits.h"
#include "kernels/attention/cuda/attention_params.h"

namespace kvanta::kernels::cuda {

static_assert(kGroupTokens == kChunkTokens);

// Properties that follow from the decode kind alone.
template <DecodeKind kDecode>
struct KvTypeTraits {
  static constexpr DecodeKind kDecodeKind = kDecode;
  static constexpr bool kF32 = kDecode == DecodeKind::kF32;
  static constexpr bool kBf16 = kDecode == DecodeKind::kBf16 || kF32;  // as operands
  static constexpr bool kTrellis = kDecode == DecodeKind::kTrellis || kDecode == DecodeKind::kKlt;
  static constexpr bool kSubbyte = kDecode == DecodeKind::kE2M1 || kDecode == DecodeKind::kE3M2 ||
                                   kDecode == DecodeKind::kFields || kDecode == DecodeKind::kLloyd || kTrellis;
  static constexpr int kBits = kSubbyte                               ? 0
                               : kF32                                 ? 32
                               : kBf16 || kDecode == DecodeKind::kF16 ? 16
                                                                      : 8;  // 0: bit sections
  // Codes may be NaN: masked tokens must not be multiplied, not even by 0.
  static constexpr bool kHasNan = !kSubbyte && kDecode != DecodeKind::kInt8;
  // Codes are exact; queries and probabilities are split into two bf16 terms or rounded to one f16 term. With f32 codes
  // (three bf16 terms) they have three terms as well; products with term indices summing to 2 or less give f32's bits.
  static constexpr int kTerms = kF32 ? 3 : kBf16 ? 2 : 1;
  static constexpr int kCodeTerms = kF32 ? 3 : 1;
};

// `levels`: of trellis codes, in shared memory (trellis_codes.h).
template <class Format>
struct StaticKvType : KvTypeTraits<DecodeKindOf(Format::kElementType)> {
  static_assert(CanDecode(Format::kElementType, Format::kScaling));
  static constexpr bool kFixed = true;
  static constexpr formats::ElementType kElementType = Format::kElementType;
  static constexpr KvTypeDesc kDesc = MakeKvTypeDesc(Format::kElementType, Format::kScaling);

  int levels;

  explicit KVANTA_DEVICE StaticKvType(const KvTypeDesc& /*desc*/, int in_shared = 0) : levels(in_shared) {}
  static constexpr int LowBits() { return kDesc.low_bits; }
  static constexpr int HighBits() { return kDesc.high_bits; }
  static constexpr int Offset() { return kDesc.offset; }
  static constexpr BlockScale BlockScaling() { return BlockScaleOf(kDesc.scaling); }
  static constexpr bool HasBlockOffset() { return kDesc.scaling.block_offset; }
  static constexpr formats::ScaleType TokenScaling() { return kDesc.scaling.token; }
  static constexpr bool HasTokenOffset() { return kDesc.scaling.token_offset; }
  static constexpr bool HasChannelScales() { return kDesc.scaling.token_group != 0 && !HasChannelBits(); }
  static constexpr bool HasChannelBits() { return kDesc.scaling.channel_bits; }
};

template <DecodeKind kDecode>
struct RuntimeKvType : KvTypeTraits<kDecode> {
  static constexpr bool kFixed = false;
  static constexpr formats::ElementType kElementType =
      kDecode == DecodeKind::kE2M1 ? formats::ElementType::kE2M1 : formats::ElementType::kFp32;
  static constexpr bool kHasBlocks = kDecode == DecodeKind::kE4M3 || kDecode == DecodeKind::kInt8 ||
                                     kDecode == DecodeKind::kE2M1 || kDecode == DecodeKind::kE3M2 ||
                                     kDecode == DecodeKind::kFields;
  static constexpr bool kHasTokens = kDecode == DecodeKind::kE4M3 || kDecode == DecodeKind::kInt8 ||
                                     kDecode == DecodeKind::kFields || kDecode == DecodeKind::kLloyd ||
                                     RuntimeKvType::kTrellis;
  const KvTypeDesc& desc;
  int levels;

  explicit KVANTA_DEVICE RuntimeKvType(const KvTypeDesc& d, int in_shared = 0) : desc(d), levels(in_shared) {}
  KVANTA_DEVICE int LowBits() const {
    return kDecode == DecodeKind::kE2M1 || kDecode == DecodeKind::kE3M2 ? 4 : desc.low_bits;
  }
  KVANTA_DEVICE int HighBits() const {
    return kDecode == DecodeKind::kE2M1 ? 0 : kDecode == DecodeKind::kE3M2 ? 2 : desc.high_bits;
  }
  KVANTA_DEVICE int Offset() const { return desc.offset; }
  KVANTA_DEVICE BlockScale BlockScaling() const { return kHasBlocks ? BlockScaleOf(desc.scaling) : BlockScale::kNone; }
  KVANTA_DEVICE bool HasBlockOffset() const { return kDecode == DecodeKind::kFields && desc.scaling.block_offset; }
  KVANTA_DEVICE formats::ScaleType TokenScaling() const {
    return kHasTokens ? desc.scaling.token : formats::ScaleType::kNone;
  }
  KVANTA_DEVICE bool HasTokenOffset() const { return kDecode == DecodeKind::kFields && desc.scaling.token_offset; }
  KVANTA_DEVICE bool HasChannelScales() const {
    return kDecode == DecodeKind::kFields && desc.scaling.token_group != 0;
  }
  KVANTA_DEVICE bool HasChannelBits() const { return kDecode == DecodeKind::kKlt && desc.scaling.channel_bits; }
};

// The K/V types that a kernel supports. Visit calls `visit` with the type for `decode`, which is uniform across
// threads; `levels`: as in the types.
template <class First, class... More>
struct KvTypeDispatch {
  using Stored = First;
  static constexpr int kTerms = std::max({First::kTerms, More::kTerms...});
  static constexpr bool kHasTrellis = (First::kTrellis || ... || More::kTrellis);

  template <class F>
  static KVANTA_DEVICE void Visit(DecodeKind decode, const KvTypeDesc& desc, F visit, int levels = 0) {
    if constexpr (sizeof...(More) == 0) {
      visit(First(desc, levels));
    } else {
      if (decode == First::kDecodeKind) {
        visit(First(desc, levels));
      } else {
        KvTypeDispatch<More...>::Visit(decode, desc, visit, levels);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
