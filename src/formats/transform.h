// Transforms applied to a row before encoding (and to q, and inversely to the attention output).
#pragma once

#include <span>

namespace kvanta::formats {

// Largest power of two that divides head_dim: the block of the (block-diagonal) Hadamard transform; 80 -> 16.
int HadamardBlock(int head_dim) noexcept;

// In place, f32, stages of stride 1, 2, 4, ..., one final multiply by 1/sqrt(block). Its own inverse up to rounding.
// Bit-exact everywhere: no FMA contraction. x: [head_dim].
void Hadamard(float* x, int head_dim) noexcept;

// What happens to a row of one side and KV head before it is encoded: its mean is subtracted, its outlier channels are
// taken out (and become 0), the rest is rotated. A query goes the same way without the mean.
struct RowTransform {
  int head_dim = 0;
  bool hadamard = false;
  const float* mean = nullptr;         // [head_dim], or none
  std::span<const int> outliers = {};  // channels

  // row, x: [head_dim]; taken: [outliers].
  void Forward(const float* row, float* x, float* taken) const noexcept;
  // The way back, in place.
  void Inverse(float* x, const float* taken) const noexcept;
};

}  // namespace kvanta::formats
