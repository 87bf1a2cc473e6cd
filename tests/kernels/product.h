#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/linear/linear.h"

namespace kvanta::kernels {

// y [rows][y_stride] for x [rows][in]; elements that are not written stay -77. A write beyond the last row fails the
// test.
inline std::vector<float> Product(const Linear& linear, const std::vector<float>& x, int64_t rows, int64_t y_stride) {
  const auto size = static_cast<size_t>(rows * y_stride);
  std::vector<float> y(size + static_cast<size_t>(y_stride), -77.0F);
  linear.Forward(x.data(), rows, y.data(), y_stride);
  EXPECT_EQ(std::count(y.begin() + static_cast<std::ptrdiff_t>(size), y.end(), -77.0F), y_stride) << rows << " rows";
  y.resize(size);
  return y;
}

// Selects the rows that are compared with an oracle: all. Under a sanitizer the last one: the double loops of oracles
// would take most of the time there, kernels compute every row, and other builds compare them.
inline bool IsCompared([[maybe_unused]] int64_t row, [[maybe_unused]] int64_t rows) {
#ifdef KVANTA_SANITIZED
  return row + 1 == rows;
#else
  return true;
#endif
}

}  // namespace kvanta::kernels
