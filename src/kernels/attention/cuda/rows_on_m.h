// Query rows on M, for the products of warpgroups, where row_state.h has them on N. Include the primitives first.
//
// In place of lane (g, t)'s rows 8 i + 2 t + q and tokens or channels 4 g + j, for q in {0, 1}, a lane has rows 8 i + g
// and tokens or channels 4 (2 t + e) + j, for e in {0, 1}: a transposition of 8 x 8 values of each i and j.
#pragma once

#include "kernels/attention/cuda/row_state.h"

namespace kvanta::kernels::cuda {

// From rows on N to rows on M, and back: the values of q = 0 and 1, or of e = 0 and 1.
template <class T>
KVANTA_DEVICE void TransposeRows(T& first, T& second) {
  const auto a = std::bit_cast<uint32_t>(first);
  const auto b = std::bit_cast<uint32_t>(second);
  const uint32_t low = Transpose8x8(PermuteBytes(a, b, 0x5410));
  const uint32_t high = Transpose8x8(PermuteBytes(a, b, 0x7632));
  first = std::bit_cast<T>(PermuteBytes(low, high, 0x5410));
  second = std::bit_cast<T>(PermuteBytes(low, high, 0x7632));
}
template <int kRowTiles>
KVANTA_DEVICE void TransposeValues(RowValues<kRowTiles>& values) {
  KVANTA_UNROLL
  for (int i = 0; i < kRowTiles; ++i) TransposeRows(values[i][0], values[i][1]);
}
template <int kRowTiles>
KVANTA_DEVICE void TransposeFragments(RowFragments<kRowTiles>& fragments) {
  KVANTA_UNROLL
  for (int i = 0; i < 4 * kRowTiles; ++i) {
    float(&pairs)[4] = fragments[i / 4][i / 2 % 2];
    TransposeRows(pairs[i % 2 * 2], pairs[i % 2 * 2 + 1]);
  }
}

// Combines the values of e = 0 and 1 of the lanes that share a row on M, those of all t, in the order of ReduceRow.
template <class F>
KVANTA_DEVICE float ReduceLaneRow(const float (&values)[2], F combine) {
  float value = combine(values[0], values[1]);
  value = combine(value, ShuffleXor(value, 1));
  return combine(value, ShuffleXor(value, 2));
}

}  // namespace kvanta::kernels::cuda
