// Normally distributed floats for tests that make many of them.
#pragma once

#include <cmath>
#include <random>

namespace kvanta {

// std::normal_distribution<float> of libstdc++ over std::mt19937, with the same bits. Unoptimised, that one takes two
// logarithms in long double for every draw: most of the time of some tests under sanitizers.
class NormalFloats {
 public:
  explicit NormalFloats(float mean = 0, float deviation = 1) : mean_(mean), deviation_(deviation) {}

  float operator()(std::mt19937& random) {
    if (has_saved_) {
      has_saved_ = false;
      return saved_ * deviation_ + mean_;
    }
    float x = 0, y = 0, r2 = 0;
    do {
      x = 2 * Uniform(random) - 1;
      y = 2 * Uniform(random) - 1;
      r2 = x * x + y * y;
    } while (r2 > 1 || r2 == 0);
    const float scale = std::sqrt(-2 * std::log(r2) / r2);
    saved_ = x * scale;
    has_saved_ = true;
    return y * scale * deviation_ + mean_;
  }

 private:
  // In [0, 1).
  static float Uniform(std::mt19937& random) {
    const float value = static_cast<float>(random()) / 4294967296.0F;
    return value < 1 ? value : std::nextafter(1.0F, 0.0F);
  }

  float mean_, deviation_;
  float saved_ = 0;  // the second of a pair
  bool has_saved_ = false;
};

}  // namespace kvanta
