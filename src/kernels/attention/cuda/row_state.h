// Online softmax of a tile's query rows. Include the primitives first.
#pragma once

#include <limits>

#include "kernels/attention/cuda/queries.h"

namespace kvanta::kernels::cuda {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// A lane's part of a chunk's logits or probabilities, lane (g, t): [row tile][tile of tokens][element]. Element
// 2 (j % 2) + q of tile j / 2 is token 4 g + j of row 8 tile + 2 t + q: the result of K Q^T.
template <int kRowTiles>
using RowFragments = float[kRowTiles][2][4];

// One value for each of a lane's rows 8 tile + 2 t + q: [tile][q].
template <int kRowTiles>
using RowValues = float[kRowTiles][2];

// Calls f(tile, q) for each of a lane's rows.
template <int kRowTiles, class F>
KVANTA_DEVICE void ForRows(F f) {
  KVANTA_UNROLL
  for (int i = 0; i < 2 * kRowTiles; ++i) f(i / 2, i % 2);
}
// The tile's row of a lane's (tile, q).
KVANTA_DEVICE int RowOf(int tile, int q, int t) {
  return kRowsPerMma * tile + 2 * t + q;
}

// Reduces over the lanes that share a row: those of all g.
template <class T, class F>
KVANTA_DEVICE T ReduceRow(T value, F combine) {
  value = combine(value, ShuffleXor(value, 4));
  value = combine(value, ShuffleXor(value, 8));
  return combine(value, ShuffleXor(value, 16));
}
KVANTA_DEVICE float RowMaximum(float value) {
  return ReduceRow(value, [](float a, float b) { return fmaxf(a, b); });
}
KVANTA_DEVICE float RowSum(float value) {
  return ReduceRow(value, [](float a, float b) { return a + b; });
}

// Softmax state of a lane's rows.
template <int kRowTiles>
struct RowState {
  RowValues<kRowTiles> max;    // maximum of the logits, in powers of 2
  RowValues<kRowTiles> sum;    // sum of this lane's probabilities
  int exponent[kRowTiles][2];  // outputs are in units of 2^(exponent - kTopExponent)
};

// Initial exponent: below any fp16 scale (probabilities would lose bits below it). bf16 and f32 values have no scale,
// so their exponent stays constant; exact pages in a quantized layer use the layer's exponent.
inline constexpr int kMinExponent = -40;
inline constexpr int kMaxExponent = 126;

// The exponent that a largest scale needs, so that probabilities times scales fit f16.
KVANTA_DEVICE int ExponentOfScales(float largest) {
  const int exponent = ExponentOf(largest);
  return exponent > kMaxExponent ? kMaxExponent : exponent;
}
// Raises an exponent to another, and lowers the factor for what is in units of it.
KVANTA_DEVICE void RaiseExponent(int to, int& exponent, float& factor) {
  if (to <= exponent) return;
  factor *= PowerOfTwo(exponent - to);
  exponent = to;
}

// State before the first token.
template <int kRowTiles>
KVANTA_DEVICE void InitRowState(DecodeKind values, RowState<kRowTiles>& state) {
  ForRows<kRowTiles>([&](int tile, int q) {
    state.max[tile][q] = kMinusInfinity;
    state.sum[tile][q] = 0;
    state.exponent[tile][q] = values == DecodeKind::kBf16 || values == DecodeKind::kF32 ? kTopExponent : kMinExponent;
  });
}

// Maximum logit of each row.
template <int kRowTiles>
KVANTA_DEVICE void RowMax(const RowFragments<kRowTiles>& s, RowValues<kRowTiles>& row_max) {
  ForRows<kRowTiles>([&](int tile, int q) {
    const auto& x = s[tile];
    row_max[tile][q] = RowMaximum(fmaxf(fmaxf(x[0][q], x[0][2 + q]), fmaxf(x[1][q], x[1][2 + q])));
  });
}

// Online softmax: turns logits `s` into probabilities relative to the running maximum and updates the state. `rescale`:
// factor for the sums accumulated so far.
template <int kRowTiles>
KVANTA_DEVICE void Softmax(const RowValues<kRowTiles>& row_max, RowFragments<kRowTiles>& s, RowState<kRowTiles>& state,
                           RowValues<kRowTiles>& rescale) {
  ForRows<kRowTiles>([&](int tile, int q) {
    const float max = fmaxf(state.max[tile][q], row_max[tile][q]);
    const float base = max == kMinusInfinity ? 0.0F : max;
    rescale[tile][q] = Exp2(state.max[tile][q] - base);
    state.max[tile][q] = max;
    float sum = 0;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      float& x = s[tile][j / 2][j % 2 * 2 + q];
      x = Exp2(x - base);
      sum += x;
    }
    state.sum[tile][q] = MultiplyAdd(state.sum[tile][q], rescale[tile][q], sum);
  });
}

}  // namespace kvanta::kernels::cuda
