#include "formats/transform.h"

#include <cmath>

namespace kvanta::formats {

int HadamardBlock(int head_dim) noexcept {
  return head_dim & -head_dim;
}

void Hadamard(float* x, int head_dim) noexcept {
  const int block = HadamardBlock(head_dim);
  for (int stride = 1; stride < block; stride *= 2) {
    for (int begin = 0; begin < head_dim; begin += 2 * stride) {
      float* low = x + begin;
      float* high = low + stride;
      for (int i = 0; i < stride; ++i) {
        const float sum = low[i] + high[i];
        const float difference = low[i] - high[i];
        low[i] = sum;
        high[i] = difference;
      }
    }
  }
  const auto norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < head_dim; ++i) x[i] *= norm;
}

}  // namespace kvanta::formats
