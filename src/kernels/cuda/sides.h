// A side as attention's kernels see it: one format, of which the compiler knows everything, or one family of codes,
// whose widths and scales the launch says. What is written for the second is the first's source, too: there the
// questions below are answered while compiling. A unit that includes this has included the primitives.
#pragma once

#include <algorithm>

#include "formats/code.h"
#include "formats/format_traits.h"
#include "kernels/cuda/launch.h"

namespace kvanta::kernels::cuda {

static_assert(kTileTokens == kChunkTokens);

// What is the same for all of a family.
template <Family kOf>
struct FamilyTraits {
  static constexpr Family kFamily = kOf;
  static constexpr bool kF32 = kOf == Family::kF32;
  static constexpr bool kBf16 = kOf == Family::kBf16 || kF32;  // as operands
  static constexpr bool kNarrow = kOf == Family::kE2M1 || kOf == Family::kFields || kOf == Family::kLloyd;
  static constexpr int kBits = kNarrow ? 0 : kF32 ? 32 : kBf16 || kOf == Family::kF16 ? 16 : 8;  // 0: of planes
  // Codes that may be NaN: of slots that a query does not see they must not be multiplied, not even by 0.
  static constexpr bool kHasNan = !kNarrow && kOf != Family::kInt8;
  // Codes are kept to the last bit; queries and weights are floats of 8 bits in two terms, or of 11 in one. Beside f32
  // they have three, as the codes do: of their products, those whose terms are third or less together are f32's bits.
  static constexpr int kTerms = kF32 ? 3 : kBf16 ? 2 : 1;
  static constexpr int kCodeTerms = kF32 ? 3 : 1;
};

template <class Format>
struct FixedSide : FamilyTraits<FamilyOf(Format::kCode)> {
  static_assert(HasSideCode(Format::kCode, Format::kScaling));
  static constexpr bool kFixed = true;
  static constexpr formats::Code kCode = Format::kCode;
  static constexpr SideCode kSide = MakeSideCode(Format::kCode, Format::kScaling);

  explicit KVANTA_DEVICE FixedSide(const SideCode& /*code*/) {}
  static constexpr int LowBits() { return kSide.low_bits; }
  static constexpr int HighBits() { return kSide.high_bits; }
  static constexpr int Offset() { return kSide.offset; }
  static constexpr BlockScale Block() { return BlockScaleOf(kSide.scaling); }
  static constexpr bool BlockZero() { return kSide.scaling.block_zero; }
  static constexpr formats::ScaleType Token() { return kSide.scaling.token; }
  static constexpr bool TokenZero() { return kSide.scaling.token_zero; }
  static constexpr bool Channel() { return kSide.scaling.tile != 0; }
};

template <Family kOf>
struct FamilySide : FamilyTraits<kOf> {
  static constexpr bool kFixed = false;
  static constexpr formats::Code kCode = kOf == Family::kE2M1 ? formats::Code::kE2M1 : formats::Code::kFp32;
  static constexpr bool kHasBlocks =
      kOf == Family::kE4M3 || kOf == Family::kInt8 || kOf == Family::kE2M1 || kOf == Family::kFields;
  static constexpr bool kHasTokens =
      kOf == Family::kE4M3 || kOf == Family::kInt8 || kOf == Family::kFields || kOf == Family::kLloyd;
  const SideCode& code;

  explicit KVANTA_DEVICE FamilySide(const SideCode& of) : code(of) {}
  KVANTA_DEVICE int LowBits() const { return kOf == Family::kE2M1 ? 4 : code.low_bits; }
  KVANTA_DEVICE int HighBits() const { return kOf == Family::kE2M1 ? 0 : code.high_bits; }
  KVANTA_DEVICE int Offset() const { return code.offset; }
  KVANTA_DEVICE BlockScale Block() const { return kHasBlocks ? BlockScaleOf(code.scaling) : BlockScale::kNone; }
  KVANTA_DEVICE bool BlockZero() const { return kOf == Family::kFields && code.scaling.block_zero; }
  KVANTA_DEVICE formats::ScaleType Token() const { return kHasTokens ? code.scaling.token : formats::ScaleType::kNone; }
  KVANTA_DEVICE bool TokenZero() const { return kOf == Family::kFields && code.scaling.token_zero; }
  KVANTA_DEVICE bool Channel() const { return kOf == Family::kFields && code.scaling.tile != 0; }
};

// The sides that a kernel knows. Calls visit with that of the launch's code, which is one for all threads.
template <class First, class... More>
struct SideList {
  using Stored = First;
  static constexpr int kTerms = std::max({First::kTerms, More::kTerms...});

  template <class Visit>
  static KVANTA_DEVICE void Of(Family family, const SideCode& code, Visit visit) {
    if constexpr (sizeof...(More) == 0) {
      visit(First(code));
    } else {
      if (family == First::kFamily) {
        visit(First(code));
      } else {
        SideList<More...>::Of(family, code, visit);
      }
    }
  }
};

}  // namespace kvanta::kernels::cuda
