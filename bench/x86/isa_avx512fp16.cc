// AVX-512 FP16: the AVX-512 loops, and multiply-adds of fp16.
#include "bench/roofline_table.h"
#include "kernels/cpu/x86/vec16_avx512.h"
// After AVX-512.
#include "kernels/cpu/x86/fp16x32.h"

namespace kvanta::kernels {
namespace {

// Multiply-adds whose sums converge to 2.
float Fp16FmaLoop(int64_t rounds, double* operations) noexcept {
  constexpr int kSums = 16, kLanes = 32;
  const __m512i half = _mm512_set1_epi16(0x3800), one = _mm512_set1_epi16(0x3c00);
  __m512i sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_epi16(static_cast<int16_t>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) sums[i] = Fp16x32::Fma(sums[i], half, one);
  }
  *operations = 2.0 * kLanes * kSums * static_cast<double>(rounds);
  Vec16::F all = Vec16::Zero();
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    all = Vec16::Add(all, _mm512_cvtph_ps(_mm512_castsi512_si256(sums[i])));
    all = Vec16::Add(all, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(sums[i], 1)));
  }
  return Vec16::Sum(all);
}

}  // namespace

const RooflineTable& Avx512Fp16RooflineTable() {
  static const RooflineTable table = [] {
    RooflineTable result = Avx512RooflineTable();
    result.fp16_fma = Fp16FmaLoop;
    return result;
  }();
  return table;
}

}  // namespace kvanta::kernels
