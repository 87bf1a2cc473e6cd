// Transforms applied to a row before encoding (and to q, and inversely to the attention output).
#pragma once

#include <span>

namespace kvanta::formats {

// Largest power of two that divides head_dim: the block of the (block-diagonal) Hadamard transform; 80 -> 16.
int HadamardBlock(int head_dim) noexcept;

// In place, f32, stages of stride 1, 2, 4, ..., one final multiply by 1/sqrt(block). Its own inverse up to rounding.
// Bit-exact everywhere: no FMA contraction. x: [head_dim].
void Hadamard(float* x, int head_dim) noexcept;

// Transform of a row of one side and KV head before encoding: subtracts the mean, extracts the outlier channels (they
// become 0), rotates the rest. A query is transformed alike, without the mean.
struct RowTransform {
  int head_dim = 0;
  bool hadamard = false;
  const float* mean = nullptr;         // [head_dim], or none
  std::span<const int> outliers = {};  // channels

  // row, x: [head_dim]; outlier_values: [outliers].
  void Forward(const float* row, float* x, float* outlier_values) const noexcept;
  // The inverse, in place.
  void Inverse(float* x, const float* outlier_values) const noexcept;
};

}  // namespace kvanta::formats
