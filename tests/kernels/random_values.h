#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "normal_floats.h"

namespace kvanta::kernels {

// Normal values of standard deviation `scale`.
inline std::vector<float> RandomValues(int64_t n, uint32_t seed, float scale = 1) {
  std::mt19937 generator(seed);
  NormalFloats normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = scale * normal(generator);
  return values;
}

}  // namespace kvanta::kernels
