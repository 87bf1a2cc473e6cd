// Keys of multi-head latent attention (MLA) and of its indexers that architectures share.
#pragma once

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

// Sets config.mla but for rope_interleave, the cache's shape, the ropes' sizes, the scale of the softmax and biases.
void ReadMla(const JsonObject& json, ModelConfig& config);

// Sets config.indexer but for rope_interleave, and gives every layer one. After ReadMla.
void ReadIndexer(const JsonObject& json, ModelConfig& config);

}  // namespace kvanta::models
