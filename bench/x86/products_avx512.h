// Products of the AVX-512 units' dots, for roofline_loops.h.
#pragma once

#include "kernels/cpu/x86/vec16_avx512.h"
#include "kernels/linear/cpu/x86/blocks_avx512.h"

namespace kvanta::kernels {
namespace {

// Exact dot of bytes: sum += four products of u8 a and s8 b in each lane.
struct WideProducts {
  static constexpr int kProducts = 64;  // products of one Add()
  static constexpr int kTerms = 2;      // products per 16-bit operand
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) { return DotBytes(sum, a, b); }
};
using SubbyteProducts = WideProducts;

}  // namespace
}  // namespace kvanta::kernels
