#include "kernels/cpu/x86/vec16_avx2.h"
#include "kernels/linear/cpu/x86/blocks_avx2.h"

namespace kvanta::kernels {
namespace {

// Exact dot of 16-bit operands: sum += a0 b0 + a1 b1 in each lane.
struct WideProducts {
  static constexpr int kProducts = 32;  // products of one Add()
  static constexpr int kTerms = 1;      // products per 16-bit operand
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
  }
};
// Dot of bytes whose products fit 16-bit sums: sum += two products of u8 a and s8 b.
struct SubbyteProducts {
  static constexpr int kProducts = 64;
  static KVANTA_INLINE Vec16::I Add(Vec16::I sum, Vec16::I a, Vec16::I b) {
    return {_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(a.lo, b.lo)),
            _mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(a.hi, b.hi))};
  }
};

}  // namespace
}  // namespace kvanta::kernels

#include "bench/roofline_loops.h"

namespace kvanta::kernels {

const RooflineTable& Avx2RooflineTable() {
  return kRooflineTable;
}

}  // namespace kvanta::kernels
