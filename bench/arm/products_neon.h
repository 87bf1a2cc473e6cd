// Products of the NEON units' dots, for roofline_loops.h.
#pragma once

#include "kernels/cpu/arm/vec16_neon.h"
#include "kernels/linear/cpu/arm/blocks_neon.h"

namespace kvanta::kernels {
namespace {

// Exact dot of operands of 16 bits: of two bytes each where the unit has sdot, else of 16-bit lanes.
struct WideProducts {
#if defined(__ARM_FEATURE_DOTPROD)
  static constexpr int kProducts = 64;  // products of one Add()
  static constexpr int kTerms = 2;      // products per 16-bit operand
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return Each(DotSigned, sum, Cast<U4>(a), Cast<U4>(b));
  }
#else
  static constexpr int kProducts = 32;
  static constexpr int kTerms = 1;
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return Each(AddProducts, sum, Cast<S8>(a), Cast<S8>(b));
  }
#endif
};
struct SubbyteProducts {
  static constexpr int kProducts = 64;
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return Each(DotSmall, sum, Cast<U4>(a), Cast<U4>(b));
  }
};

}  // namespace
}  // namespace kvanta::kernels
