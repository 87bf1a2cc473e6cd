// The decoder that all architectures share: embedding, layers of an attention and an MLP block, final norm.
#pragma once

#include <memory>

#include "models/config/config.h"
#include "models/model.h"
#include "weights/safetensors.h"

namespace kvanta::models {

// `config` holds the differences: norms, biases, ropes, windows, MLA, experts, softcaps, tensor names.
std::unique_ptr<Model> LoadDecoder(const ModelConfig& config, const weights::Checkpoint& checkpoint, kernels::Ops& ops,
                                   const LoadOptions& options);

}  // namespace kvanta::models
