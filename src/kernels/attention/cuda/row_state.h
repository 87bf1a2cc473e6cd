// Online softmax of a tile's query rows. Include the primitives first.
#pragma once

#include <limits>

#include "kernels/attention/cuda/queries.h"

namespace kvanta::kernels::cuda {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Softmax state of a lane's rows g and g + 8 (indices 0 and 1).
struct RowState {
  float max[2];     // of logits, in powers of 2
  float sum[2];     // of this lane's probabilities
  int exponent[2];  // outputs are in units of 2^(exponent - kTopExponent)
};

// Initial exponent: below any fp16 scale (probabilities would lose bits below it). bf16 and f32 values have no scale,
// so their exponent stays constant; exact pages in a quantized layer use the layer's exponent.
inline constexpr int kMinExponent = -40;
inline constexpr int kMaxExponent = 126;

// State before the first token. tokens: the tile's token of each row, as in MakeChunkView.
KVANTA_DEVICE void InitRowState(const QueryTile& tile, DecodeKind values, int lane, RowState& state, int (&tokens)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    tokens[row] = (lane / 4 + 8 * row) / tile.heads;
    state.max[row] = kMinusInfinity;
    state.sum[row] = 0;
    state.exponent[row] = values == DecodeKind::kBf16 || values == DecodeKind::kF32 ? kTopExponent : kMinExponent;
  }
}

// Maximum logit of rows g and g + 8.
KVANTA_DEVICE void RowMax(const float (&s)[4][4], float (&row_max)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    float max = kMinusInfinity;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) max = fmaxf(max, fmaxf(s[j][2 * row], s[j][2 * row + 1]));
    max = fmaxf(max, ShuffleXor(max, 1));
    row_max[row] = fmaxf(max, ShuffleXor(max, 2));
  }
}

// Online softmax: turns logits `s` into probabilities relative to the running maximum and updates the state. `rescale`:
// factor for the sums accumulated so far.
KVANTA_DEVICE void Softmax(const float (&row_max)[2], float (&s)[4][4], RowState& state, float (&rescale)[2]) {
  KVANTA_UNROLL
  for (int row = 0; row < 2; ++row) {
    const float max = fmaxf(state.max[row], row_max[row]);
    const float base = max == kMinusInfinity ? 0.0F : max;
    rescale[row] = Exp2(state.max[row] - base);
    state.max[row] = max;
    float sum = 0;
    KVANTA_UNROLL
    for (int j = 0; j < 4; ++j) {
      KVANTA_UNROLL
      for (int i = 2 * row; i < 2 * row + 2; ++i) {
        s[j][i] = Exp2(s[j][i] - base);
        sum += s[j][i];
      }
    }
    state.sum[row] = MultiplyAdd(state.sum[row], rescale[row], sum);
  }
}

}  // namespace kvanta::kernels::cuda
