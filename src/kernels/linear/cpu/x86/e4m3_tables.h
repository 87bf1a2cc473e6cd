// E4M3 codes of four k as f32 by byte tables, for units whose permutations of bytes are faster than conversions: 8
// instructions for 64 codes, where LoadE4M3Pair() takes 12. Included after group_quant_layout.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/inline.h"
#include "kernels/linear/cpu/group_quant_layout.h"

namespace kvanta::kernels {
namespace {

// Upper half of the f32 of a code without its sign, times 2^-8. Its lower half is 0.
constexpr uint16_t E4m3UpperHalf(int magnitude) {
  const int exponent = magnitude >> 3, mantissa = magnitude & 7;
  constexpr int kBias = 127 - 7 - 8;
  if (exponent != 0) return static_cast<uint16_t>((exponent + kBias) << 7 | mantissa << 4);
  if (mantissa == 0) return 0;
  const int top = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;  // bit of a subnormal
  return static_cast<uint16_t>((top - 2 + kBias) << 7 | (mantissa - (1 << top)) << (7 - top));
}

struct E4m3Tables {
  alignas(64) uint8_t high[128] = {}, low[128] = {};  // bytes of E4m3UpperHalf()
  alignas(64) uint8_t of_k[4][64] = {};               // places of bytes 2 and 3 of lanes, in `high` and then `low`

  constexpr E4m3Tables() {
    for (int code = 0; code < 128; ++code) {
      const uint16_t upper = E4m3UpperHalf(code);
      high[code] = static_cast<uint8_t>(upper >> 8);
      low[code] = static_cast<uint8_t>(upper);
    }
    for (int k = 0; k < 4; ++k) {
      for (int column = 0; column < 16; ++column) {
        const auto code = static_cast<uint8_t>(16 * k + column);
        of_k[k][4 * column + 2] = static_cast<uint8_t>(64 + code);
        of_k[k][4 * column + 3] = code;
      }
    }
  }
};
constexpr E4m3Tables kE4m3Tables;

struct TableE4m3Codes : E4m3Codes {
  // Codes of four k, 16 columns each.
  KVANTA_INLINE void LoadFour(const uint8_t* p, Vec16::F* values) const {
    const __m512i codes = _mm512_loadu_si512(p), low = Lookup(kE4m3Tables.low, codes);
    const __m512i signs = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
    const __m512i high = _mm512_or_si512(Lookup(kE4m3Tables.high, codes), signs);
    constexpr __mmask64 kUpperHalves = 0xcccccccccccccccc;
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const __m512i index = _mm512_load_si512(kE4m3Tables.of_k[k]);
      values[k] = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi8(kUpperHalves, high, index, low));
    }
  }

 private:
  static KVANTA_INLINE __m512i Lookup(const uint8_t* table, __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
  }
};

}  // namespace
}  // namespace kvanta::kernels
