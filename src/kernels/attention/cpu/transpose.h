// Transposes codes from K's order to V's (formats/cell_layout.h) without decoding: 4 / e words of K (e bytes per
// element) and as many words of V are the same bytes, transposed. Included by isa_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/inline.h"

namespace kvanta::kernels {
namespace {

using TransposeBytes = uint8_t __attribute__((vector_size(16)));

// Transposes the squares in 16 bytes of a line: elements of 1 byte are one square of 4 x 4, elements of 2 bytes two
// squares of 2 x 2.
template <int kElement>
KVANTA_INLINE TransposeBytes TransposeSquares(TransposeBytes x) {
  if constexpr (kElement == 1) {
    return __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  } else if constexpr (kElement == 2) {
    return __builtin_shufflevector(x, x, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  }
  return x;
}

template <int kElement>
KVANTA_INLINE void TransposeGroups(const TransposePass& pass) {
  constexpr int kTokens = 4 / kElement;  // in a word of V
  constexpr int kSquare = 4 * kTokens;   // bytes
  const int64_t stride = kTokens * pass.row_bytes;
  const uint8_t* line = pass.keys;
  for (int group = 0; group < pass.groups; ++group) {
    uint8_t* values = pass.values + group * 16 * pass.row_bytes;
    for (int64_t word = 0; word < pass.row_bytes / 4; ++word, line += 64) {
      for (int part = 0; part < 4; ++part) {
        TransposeBytes x;
        __builtin_memcpy(&x, line + part * 16, 16);
        x = TransposeSquares<kElement>(x);
        uint8_t squares[16];
        __builtin_memcpy(squares, &x, 16);
        for (int square = 0; square < 16 / kSquare; ++square) {
          __builtin_memcpy(values + (part * (16 / kSquare) + square) * stride + word * kSquare,
                           squares + square * kSquare, kSquare);
        }
      }
    }
  }
}

void Transpose(const TransposePass& pass) {
  switch (pass.element_bytes) {
    case 1:
      return TransposeGroups<1>(pass);
    case 2:
      return TransposeGroups<2>(pass);
    default:
      return TransposeGroups<4>(pass);
  }
}

}  // namespace
}  // namespace kvanta::kernels
