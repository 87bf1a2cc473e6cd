// What tells one architecture from another. Each has a file of its own and a line in models.cc.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "models/config.h"
#include "models/json.h"
#include "models/model.h"
#include "models/safetensors.h"

namespace kvanta::models {

struct Architecture {
  std::string_view name;        // in config.json's "architectures"
  std::string_view model_type;  // in config.json's "model_type" and in scale files
  int default_head_dim;         // where config.json gives none; 0: hidden_size / num_attention_heads
  // Reads what is particular to it: biases, norms, windows. The common keys are in `config` already.
  void (*read_config)(const JsonObject& json, ModelConfig& config);
  std::unique_ptr<Model> (*load)(const ModelConfig& config, const Checkpoint& checkpoint, kernels::Ops& ops,
                                 const LoadOptions& options);
};

extern const Architecture kLlama, kMistral, kQwen2, kQwen3, kDeepseekV2, kDeepseekV3;

// The one list of architectures.
std::span<const Architecture* const> Architectures();

// Windows per layer from `sliding_window` and `layer_types`, as Qwen2 and Qwen3 have them.
void ReadLayerWindows(const JsonObject& json, ModelConfig& config);

}  // namespace kvanta::models
