#include "formats/transform.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats/cell.h"

namespace kvanta::formats {
namespace {

// Two stages at once, of strides `stride` and 2 * stride: each value is loaded and stored once. The operations on each
// element, and their order, are those of two consecutive stages.
inline void TwoStages(float* x, int n, int stride) noexcept {
  for (int begin = 0; begin < n; begin += 4 * stride) {
    float* __restrict a = x + begin;
    float* __restrict b = a + stride;
    float* __restrict c = b + stride;
    float* __restrict d = c + stride;
    for (int i = 0; i < stride; ++i) {
      const float ab = a[i] + b[i];
      const float ab_difference = a[i] - b[i];
      const float cd = c[i] + d[i];
      const float cd_difference = c[i] - d[i];
      a[i] = ab + cd;
      b[i] = ab_difference + cd_difference;
      c[i] = ab - cd;
      d[i] = ab_difference - cd_difference;
    }
  }
}

using Four = float __attribute__((vector_size(16)));

// Stages of strides 1 and 2 on 16 values, as butterflies between the rows of a transposed 4x4 square.
inline void FirstStages(float* x) noexcept {
  Four r[4];
  std::memcpy(r, x, sizeof(r));
  const auto transpose = [](Four* m) {
    const Four a = __builtin_shufflevector(m[0], m[1], 0, 4, 1, 5), b = __builtin_shufflevector(m[2], m[3], 0, 4, 1, 5);
    const Four c = __builtin_shufflevector(m[0], m[1], 2, 6, 3, 7), d = __builtin_shufflevector(m[2], m[3], 2, 6, 3, 7);
    m[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    m[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    m[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    m[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
  };
  transpose(r);
  const Four ab = r[0] + r[1], ab_difference = r[0] - r[1];
  const Four cd = r[2] + r[3], cd_difference = r[2] - r[3];
  r[0] = ab + cd;
  r[1] = ab_difference + cd_difference;
  r[2] = ab - cd;
  r[3] = ab_difference - cd_difference;
  transpose(r);
  std::memcpy(x, r, sizeof(r));
}

inline void OneStage(float* x, int n, int stride) noexcept {
  for (int begin = 0; begin < n; begin += 2 * stride) {
    float* __restrict a = x + begin;
    float* __restrict b = a + stride;
    for (int i = 0; i < stride; ++i) {
      const float sum = a[i] + b[i];
      const float difference = a[i] - b[i];
      a[i] = sum;
      b[i] = difference;
    }
  }
}

}  // namespace

int HadamardBlock(int head_dim) noexcept {
  return head_dim & -head_dim;
}

void Hadamard(float* x, int head_dim) noexcept {
  const int block = HadamardBlock(head_dim);
  int stride = 1;
  if (block >= 4) {
    int done = 0;
    for (; done + 16 <= head_dim; done += 16) FirstStages(x + done);
    TwoStages(x + done, head_dim - done, 1);
    stride = 4;
  }
  // Constants: the compiler unrolls them.
  if (block >= 16) {
    TwoStages(x, head_dim, 4);
    stride = 16;
  }
  if (block >= 64) {
    TwoStages(x, head_dim, 16);
    stride = 64;
  }
  for (; 4 * stride <= block; stride *= 4) TwoStages(x, head_dim, stride);
  if (stride < block) OneStage(x, head_dim, stride);
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < head_dim; ++i) x[i] *= norm;
}

void MultiplyRow(const float* x, const float* matrix, int head_dim, float* out) noexcept {
  const int64_t stride = MatrixStride(head_dim);
  for (int64_t first = 0; first < stride; first += 16) {
    Four sums[4] = {};
    for (int64_t j = 0; j < head_dim; ++j) {
      Four row[4];
      std::memcpy(row, matrix + j * stride + first, sizeof(row));
      const Four factor = {x[j], x[j], x[j], x[j]};
      for (int i = 0; i < 4; ++i) sums[i] += row[i] * factor;
    }
    std::memcpy(out + first, sums, sizeof(sums));
  }
}

void RowTransform::Forward(const float* row, float* x, float* outlier_values) const noexcept {
  for (int c = 0; c < head_dim; ++c) x[c] = mean != nullptr ? row[c] - mean[c] : row[c];
  for (const int channel : outliers) {
    *outlier_values++ = x[channel];
    x[channel] = 0;
  }
  std::fill_n(x + head_dim, padding, 0.0F);
  if (hadamard) Hadamard(x, head_dim + padding);
  if (key_matrix != nullptr) {
    alignas(64) float product[kMaxHeadDim];
    multiply(x, key_matrix, head_dim, product);
    // The sign and payload of a NaN depend on the instruction set.
    for (int c = 0; c < head_dim; ++c) x[c] = std::isnan(product[c]) ? std::nanf("") : product[c];
  }
}

void RowTransform::Inverse(float* x, const float* outlier_values) const noexcept {
  if (hadamard) Hadamard(x, head_dim + padding);
  if (query_matrix != nullptr) {  // the inverse: its rows, where queries take its columns
    float stored[kMaxHeadDim];
    std::copy_n(x, head_dim, stored);
    for (int i = 0; i < head_dim; ++i) {
      const float* row = query_matrix + i * MatrixStride(head_dim);
      double sum = 0;
      for (int j = 0; j < head_dim; ++j) sum += double{row[j]} * double{stored[j]};
      x[i] = static_cast<float>(sum);
    }
  }
  for (const int channel : outliers) x[channel] = *outlier_values++;
  for (int c = 0; mean != nullptr && c < head_dim; ++c) x[c] += mean[c];
}

}  // namespace kvanta::formats
