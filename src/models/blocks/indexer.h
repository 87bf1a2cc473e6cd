// Indexer of DeepSeek Sparse Attention (DeepSeek V3.2, GLM-5): selects the tokens that a layer attends to. A token's
// score for a query is the sum over the indexer's heads of weight * max(q k, 0), with one key for all heads
// (ModelConfig::indexer, attention::Backend::Select).
#pragma once

#include <memory>
#include <string>

#include "models/blocks/head_scales.h"
#include "models/blocks/layer_blocks.h"

namespace kvanta::models {

class Indexer {
 public:
  // `module`: "model.layers.0.self_attn.indexer.".
  Indexer(const BlockSource& source, const std::string& module);

  void Place(Scratch& scratch, int64_t rows) noexcept;
  // Appends the rows' keys and selects their tokens. x: f32 [rows][hidden], normed; low: f32 [rows][q_lora_rank], from
  // which the layer's own queries are projected, too; not read with IndexerConfig::norms_inputs.
  void Select(const AttentionStep& step, const float* x, const float* low) noexcept;

 private:
  int64_t Width() const { return int64_t{indexer_.heads} * indexer_.head_dim; }
  void Rotate(const AttentionStep& step, float* x, int heads) noexcept;

  kernels::Ops& ops_;
  const IndexerConfig& indexer_;
  const int rope_dim_;
  const int64_t hidden_;
  std::unique_ptr<kernels::Linear> to_queries_;  // q_lora_rank, or hidden -> heads * head_dim
  std::unique_ptr<kernels::Linear> to_key_;      // hidden -> head_dim
  std::unique_ptr<kernels::Linear> to_weights_;  // hidden -> heads
  Buffer norm_weight_, norm_bias_;               // f32 [head_dim]
  Buffer input_norm_weight_, input_norm_bias_;   // f32 [hidden], of norms_inputs
  HeadScales query_scales_;
  // f32 [rows][...]:
  float* normed_ = nullptr;   // hidden, of norms_inputs
  float* queries_ = nullptr;  // heads * head_dim
  float* keys_ = nullptr;     // head_dim
  float* weights_ = nullptr;  // heads
};

}  // namespace kvanta::models
