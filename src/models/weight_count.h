// How many weights a model has, from its config alone.
#pragma once

#include <cstdint>

#include "models/config.h"

namespace kvanta::models {

struct WeightCount {
  int64_t matrices = 0;  // elements that are kept at the weights' dtype
  int64_t vectors = 0;   // elements that are kept as f32: norms and biases

  int64_t Parameters() const noexcept { return matrices + vectors; }
  // What a loaded model keeps, but for the zeros that fill up the last panel of a matrix (Model::WeightBytes).
  int64_t Bytes(DType store) const noexcept { return matrices * SizeOf(store) + vectors * SizeOf(DType::kF32); }
};

// Throws InputError when there are more than any machine holds.
WeightCount CountWeights(const ModelConfig& config);

}  // namespace kvanta::models
