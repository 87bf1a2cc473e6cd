#include "models/weight_count.h"

#include <fmt/format.h>

#include "kvanta/error.h"

namespace kvanta::models {

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
  return {config.layers * block_matrices + embeddings, config.layers * block_vectors + hidden};
}

}  // namespace kvanta::models
