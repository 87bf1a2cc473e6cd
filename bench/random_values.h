// Random inputs of benchmarks.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace kvanta {

inline std::vector<float> NormalValues(int64_t count, uint32_t seed, float deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

}  // namespace kvanta
