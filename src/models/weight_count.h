// Number of weights of a model, from its config alone.
#pragma once

#include <cstdint>

#include "kernels/linear/linear.h"
#include "models/config/config.h"

namespace kvanta::models {

// Type of the embeddings and the output matrix for `store` of the other matrices: 8 bits instead of 4, because their
// errors show in the logits directly.
constexpr kernels::WeightType EmbeddingType(kernels::WeightType store) noexcept {
  return store == kernels::WeightType::kInt4 ? kernels::WeightType::kInt8 : store;
}

struct WeightCount {
  int64_t matrices = 0;       // elements of the layers' matrices
  int64_t mxfp4 = 0;          // those of them that the checkpoint has in MXFP4
  int64_t quantized = 0;      // those that the checkpoint has quantized otherwise
  double quantized_bits = 0;  // bits of such an element as kept, with its share of scales
  int64_t embeddings = 0;     // elements of the embeddings and, unless tied, the output matrix
  int64_t vectors = 0;        // elements of norms, biases and routers: f32

  int64_t Parameters() const noexcept { return matrices + embeddings + vectors; }
  // Bytes of a loaded model without the padding of matrices (Model::WeightBytes has it), and with minimums in all 4-bit
  // blocks. keep_quantized: quantized weights stay as they are.
  int64_t Bytes(kernels::WeightType store, bool keep_quantized = false) const noexcept;
};

// Throws InputError for more weights than any machine holds.
WeightCount CountWeights(const ModelConfig& config);

}  // namespace kvanta::models
