// The decoder that Llama, Mistral, Qwen2 and Qwen3 share: embedding, blocks of attention and gated MLP, final norm.
#pragma once

#include <memory>

#include "models/config.h"
#include "models/model.h"
#include "models/safetensors.h"

namespace kvanta::models {

// What tells the four apart is in `config`: biases, q/k norms, windows, tied embeddings.
std::unique_ptr<Model> LoadDecoder(const ModelConfig& config, const Checkpoint& checkpoint, kernels::Ops& ops,
                                   const LoadOptions& options);

}  // namespace kvanta::models
