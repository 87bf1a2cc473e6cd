#include "models/weight_count.h"

#include <fmt/format.h>

#include "kvanta/error.h"

namespace kvanta::models {
namespace {

int64_t BytesAs(int64_t elements, kernels::WeightType type) noexcept {
  using kernels::BlockFormat;
  switch (type) {
    case kernels::WeightType::kInt8:
      return elements * BlockBytes(BlockFormat::kQ8_0) / kernels::kBlockWeights;
    case kernels::WeightType::kInt4:
      return elements * BlockBytes(BlockFormat::kQ4_1) / kernels::kBlockWeights;
    case kernels::WeightType::kF32:
      return elements * 4;
    case kernels::WeightType::kBf16:
    case kernels::WeightType::kF16:
      break;
  }
  return elements * 2;
}

}  // namespace

WeightCount CountWeights(const ModelConfig& config) {
  const int64_t hidden = config.hidden, ffn = config.ffn;
  const int64_t q = int64_t{config.heads} * config.head_dim, kv = int64_t{config.kv_heads} * config.head_dim;
  const int64_t block_matrices = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * ffn;
  int64_t block_vectors = 2 * hidden;
  if (config.qkv_bias) block_vectors += q + 2 * kv;
  if (config.o_bias) block_vectors += hidden;
  if (config.mlp_bias) block_vectors += 2 * ffn + hidden;
  if (config.qk_norm) block_vectors += int64_t{2} * config.head_dim;
  constexpr int64_t kMost = int64_t{1} << 50;
  if (block_matrices > kMost / config.layers) {
    throw InputError(fmt::format("config.json describes {} layers of {} weights, more than any machine holds",
                                 config.layers, block_matrices));
  }
  const int64_t embeddings = int64_t{config.vocab} * hidden * (config.tied_embeddings ? 1 : 2);
  return {config.layers * block_matrices, embeddings, config.layers * block_vectors + hidden};
}

int64_t WeightCount::Bytes(kernels::WeightType store) const noexcept {
  constexpr int64_t kVectorBytes = SizeOf(DType::kF32);
  return BytesAs(matrices, store) + BytesAs(embeddings, EmbeddingType(store)) + vectors * kVectorBytes;
}

}  // namespace kvanta::models
