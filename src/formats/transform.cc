#include "formats/transform.h"

#include <cmath>

namespace kvanta::formats {
namespace {

// Two stages at once, of strides `stride` and 2 * stride: each value is loaded and stored once. Every element's
// operations and their order are those of the stages one after the other.
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
    TwoStages(x, head_dim, 1);  // a constant: no inner loop is left
    stride = 4;
  }
  for (; 4 * stride <= block; stride *= 4) TwoStages(x, head_dim, stride);
  if (stride < block) OneStage(x, head_dim, stride);
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < head_dim; ++i) x[i] *= norm;
}

void RowTransform::Forward(const float* row, float* x, float* taken) const noexcept {
  for (int c = 0; c < head_dim; ++c) x[c] = mean != nullptr ? row[c] - mean[c] : row[c];
  for (const int channel : outliers) {
    *taken++ = x[channel];
    x[channel] = 0;
  }
  if (hadamard) Hadamard(x, head_dim);
}

void RowTransform::Inverse(float* x, const float* taken) const noexcept {
  if (hadamard) Hadamard(x, head_dim);
  for (const int channel : outliers) x[channel] = *taken++;
  for (int c = 0; mean != nullptr && c < head_dim; ++c) x[c] += mean[c];
}

}  // namespace kvanta::formats
