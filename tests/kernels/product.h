#pragma once

#include <cstdint>
#include <vector>

#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// y [rows][y_stride] for x [rows][in]; elements that are not written stay -77.
inline std::vector<float> Product(const Linear& linear, const std::vector<float>& x, int64_t rows, int64_t y_stride) {
  std::vector<float> y(static_cast<size_t>(rows * y_stride), -77.0F);
  linear.Forward(x.data(), rows, y.data(), y_stride);
  return y;
}

}  // namespace kvanta::kernels
