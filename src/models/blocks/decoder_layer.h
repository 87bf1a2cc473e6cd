// A layer of a decoder: attention and an MLP, with the norms before and after them.
#pragma once

#include <memory>
#include <string>

#include "models/blocks/layer_blocks.h"
#include "models/blocks/norm.h"

namespace kvanta::models {

struct DecoderLayer {
  Norm pre_attention_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;
  std::unique_ptr<AttentionBlock> attention;
  std::unique_ptr<MlpBlock> mlp;   // null: none
  Norm post_per_layer_input_norm;  // none without per-layer inputs
  float scalar = 1;                // factor of the layer's hidden states
};

// `prefix`, `mlp_prefix`: of the tensors of its attention and of its MLP.
DecoderLayer ReadDecoderLayer(const BlockSource& source, const LayerSpec& spec, const std::string& prefix,
                              const std::string& mlp_prefix);

}  // namespace kvanta::models
