// Factor of a model's embeddings.
#pragma once

#include "base/dtype.h"
#include "kernels/ops.h"
#include "models/config/config.h"

namespace kvanta::models {

// `scale` as the model's dtype has it, where transformers rounds it. store: how matrices are kept.
inline float EmbeddingScale(const ModelConfig& config, double scale, kernels::WeightType store) {
  const auto value = static_cast<float>(scale);
  if (!config.embedding_scale_rounded) return value;
  const bool elements = store != kernels::WeightType::kInt8 && store != kernels::WeightType::kInt4;
  const kernels::WeightType type = elements ? store : kernels::WeightTypeOf(config.dtype);
  if (type == kernels::WeightType::kBf16) return Bf16ToFloat(FloatToBf16(value));
  return type == kernels::WeightType::kF16 ? Fp16ToFloat(FloatToFp16(value)) : value;
}

}  // namespace kvanta::models
