// A side as attention's kernels see it: one format, of which the compiler knows everything, or one family of codes,
// whose widths and scales the launch says. What is written for the second is the first's source, too: there the
// questions below are answered while compiling. A unit that includes this has included the primitives.
#pragma once

#include <algorithm>

#include "formats/element_type.h"
#include "formats/format_traits.h"
#include "kernels/attention/cuda/launch.h"

namespace kvanta::kernels::cuda {

static_assert(kGroupTokens == kChunkTokens);

// What is the same for all of a family.
template <DecodeKind kOf>
struct KvTypeTraits {
  static constexpr DecodeKind kDecodeKind = kOf;
  static constexpr bool kF32 = kOf == DecodeKind::kF32;
  static constexpr bool kBf16 = kOf == DecodeKind::kBf16 || kF32;  // as operands
  static constexpr bool kSubbyte =
      kOf == DecodeKind::kE2M1 || kOf == DecodeKind::kE3M2 || kOf == DecodeKind::kFields || kOf == DecodeKind::kLloyd;
  static constexpr int kBits = kSubbyte ? 0 : kF32 ? 32 : kBf16 || kOf == DecodeKind::kF16 ? 16 : 8;  // 0: of planes
  // Codes that may be NaN: of slots that a query does not see they must not be multiplied, not even by 0.
  static constexpr bool kHasNan = !kSubbyte && kOf != DecodeKind::kInt8;
  // Codes are kept to the last bit; queries and weights are floats of 8 bits in two terms, or of 11 in one. Beside f32
  // they have three, as the codes do: of their products, those whose terms are third or less together are f32's bits.
  static constexpr int kTerms = kF32 ? 3 : kBf16 ? 2 : 1;
  static constexpr int kCodeTerms = kF32 ? 3 : 1;
};

template <class Format>
struct StaticKvType : KvTypeTraits<DecodeKindOf(Format::kElementType)> {
  static_assert(HasKvTypeDesc(Format::kElementType, Format::kScaling));
  static constexpr bool kFixed = true;
  static constexpr formats::ElementType kElementType = Format::kElementType;
  static constexpr KvTypeDesc kSide = MakeKvTypeDesc(Format::kElementType, Format::kScaling);

  explicit KVANTA_DEVICE StaticKvType(const KvTypeDesc& /*code*/) {}
  static constexpr int LowBits() { return kSide.low_bits; }
  static constexpr int HighBits() { return kSide.high_bits; }
  static constexpr int Offset() { return kSide.offset; }
  static constexpr BlockScale Block() { return BlockScaleOf(kSide.scaling); }
  static constexpr bool BlockOffset() { return kSide.scaling.block_offset; }
  static constexpr formats::ScaleType Token() { return kSide.scaling.token; }
  static constexpr bool TokenOffset() { return kSide.scaling.token_offset; }
  static constexpr bool Channel() { return kSide.scaling.token_group != 0; }
};

template <DecodeKind kOf>
struct RuntimeKvType : KvTypeTraits<kOf> {
  static constexpr bool kFixed = false;
  static constexpr formats::ElementType kElementType =
      kOf == DecodeKind::kE2M1 ? formats::ElementType::kE2M1 : formats::ElementType::kFp32;
  static constexpr bool kHasBlocks = kOf == DecodeKind::kE4M3 || kOf == DecodeKind::kInt8 || kOf == DecodeKind::kE2M1 ||
                                     kOf == DecodeKind::kE3M2 || kOf == DecodeKind::kFields;
  static constexpr bool kHasTokens =
      kOf == DecodeKind::kE4M3 || kOf == DecodeKind::kInt8 || kOf == DecodeKind::kFields || kOf == DecodeKind::kLloyd;
  const KvTypeDesc& code;

  explicit KVANTA_DEVICE RuntimeKvType(const KvTypeDesc& of) : code(of) {}
  KVANTA_DEVICE int LowBits() const { return kOf == DecodeKind::kE2M1 || kOf == DecodeKind::kE3M2 ? 4 : code.low_bits; }
  KVANTA_DEVICE int HighBits() const {
    return kOf == DecodeKind::kE2M1 ? 0 : kOf == DecodeKind::kE3M2 ? 2 : code.high_bits;
  }
  KVANTA_DEVICE int Offset() const { return code.offset; }
  KVANTA_DEVICE BlockScale Block() const { return kHasBlocks ? BlockScaleOf(code.scaling) : BlockScale::kNone; }
  KVANTA_DEVICE bool BlockOffset() const { return kOf == DecodeKind::kFields && code.scaling.block_offset; }
  KVANTA_DEVICE formats::ScaleType Token() const { return kHasTokens ? code.scaling.token : formats::ScaleType::kNone; }
  KVANTA_DEVICE bool TokenOffset() const { return kOf == DecodeKind::kFields && code.scaling.token_offset; }
  KVANTA_DEVICE bool Channel() const { return kOf == DecodeKind::kFields && code.scaling.token_group != 0; }
};

// The sides that a kernel knows. Calls visit with that of the launch's code, which is one for all threads.
template <class First, class... More>
struct KvTypeDispatch {
  using Stored = First;
  static constexpr int kTerms = std::max({First::kTerms, More::kTerms...});

  template <class Visit>
  static KVANTA_DEVICE void Of(DecodeKind kind, const KvTypeDesc& code, Visit visit) {
    if constexpr (sizeof...(More) == 0) {
      visit(First(code));
    } else {
      if (kind == First::kDecodeKind) {
        visit(First(code));
      } else {
        KvTypeDispatch<More...>::Of(kind, code, visit);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
