// Transforms applied to a row before encoding (and to q, and inversely to the attention output).
#pragma once

#include <cstdint>
#include <span>

#include "base/math.h"

namespace kvanta::formats {

// Largest power of two that divides head_dim: the block of the (block-diagonal) Hadamard transform; 80 -> 16.
int HadamardBlock(int head_dim) noexcept;

// In place, f32, stages of stride 1, 2, 4, ..., one final multiply by 1/sqrt(block). Its own inverse up to rounding.
// Bit-exact everywhere: no FMA contraction. x: [head_dim].
void Hadamard(float* x, int head_dim) noexcept;

// Floats between the rows of a matrix as the kernels read it: whole vectors of 16; the columns beyond head_dim are 0.
KVANTA_HD __attribute__((always_inline)) constexpr int64_t MatrixStride(int head_dim) noexcept {
  return RoundUp(head_dim, 16);
}

// out[i] = sum over j, ascending, of x[j] * matrix[j][i]; every product and every sum is rounded to f32, so that all
// backends compute the same bits (but for the payloads of NaN). matrix: [head_dim] rows, MatrixStride(head_dim) floats
// apart; out: MatrixStride(head_dim) floats, apart from x.
using MultiplyRowFn = void (*)(const float* x, const float* matrix, int head_dim, float* out);
void MultiplyRow(const float* x, const float* matrix, int head_dim, float* out) noexcept;

// Transform of a row of one side and KV head before encoding: subtracts the mean, extracts the outlier channels (they
// become 0), rotates the rest. A query is transformed alike, without the mean, and by query_matrix.
struct RowTransform {
  int head_dim = 0;
  int padding = 0;  // channels of a cell's row beyond head_dim: 0 before the Hadamard transform, which fills them
  bool hadamard = false;
  const float* mean = nullptr;         // [head_dim], or none
  std::span<const int> outliers = {};  // channels
  // +query, in place of `hadamard`: matrices of QueryTransform, or none.
  const float* key_matrix = nullptr;
  const float* query_matrix = nullptr;
  MultiplyRowFn multiply = MultiplyRow;  // or an instruction set's own

  // row: [head_dim]; x: [head_dim + padding]; outlier_values: [outliers].
  void Forward(const float* row, float* x, float* outlier_values) const noexcept;
  // The inverse, in place: x [head_dim + padding], of which the first head_dim channels are the row.
  void Inverse(float* x, const float* outlier_values) const noexcept;
};

}  // namespace kvanta::formats
