// How many weights a model has, from its config alone.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"
#include "models/config.h"

namespace kvanta::models {

// How the embeddings and the output matrix are kept where the other matrices are kept as `store`: in 8 bits where those
// have 4, for logits show every error of these.
constexpr kernels::WeightType EmbeddingType(kernels::WeightType store) noexcept {
  return store == kernels::WeightType::kInt4 ? kernels::WeightType::kInt8 : store;
}

struct WeightCount {
  int64_t matrices = 0;    // elements of the layers' matrices
  int64_t embeddings = 0;  // elements of the embeddings, and of the output matrix where it is another
  int64_t vectors = 0;     // elements that are kept as f32: norms, biases and routers

  int64_t Parameters() const noexcept { return matrices + embeddings + vectors; }
  // What a loaded model keeps, but for the zeros that fill up the last panel of a matrix (Model::WeightBytes), and with
  // minimums in every block of 4 bits.
  int64_t Bytes(kernels::WeightType store) const noexcept;
};

// Throws InputError when there are more than any machine holds.
WeightCount CountWeights(const ModelConfig& config);

}  // namespace kvanta::models
