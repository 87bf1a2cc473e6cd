// Logits for tests of sampling.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace kvanta::runner {

// Normally distributed with the standard deviation `spread`.
inline std::vector<float> RandomLogits(int vocab, uint64_t seed, float spread = 3.0F) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& x : logits) x = normal(random);
  return logits;
}

}  // namespace kvanta::runner
