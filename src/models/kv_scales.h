// Where static KV scales come from, in order of precedence; fails closed (docs/scales.md).
#pragma once

#include <string>
#include <vector>

#include "formats/scheme.h"
#include "models/config.h"
#include "models/safetensors.h"

namespace kvanta::models {

enum class ScaleSource : uint8_t { kNone, kFile, kCheckpoint };

struct KvScales {
  ScaleSource source = ScaleSource::kNone;
  std::vector<formats::LayerScales> layers;  // per layer; scale.size() == kv_heads
};

// Scale file: the known schema (kv_cache.scaling_factor by TP rank and layer) or Kvanta's own ("kvanta_kv_scales": 1).
// Throws InputError with the reason: unknown schema, missing layer or rank, not finite, not > 0, wrong model.
KvScales ParseScaleFile(std::string_view json, const std::string& name, const ModelConfig& config);

// File if `quantization_param_path` is set, else the checkpoint's tensors (every name of docs/scales.md), else kNone
// with 1.0. A checkpoint that declares static KV scales but lacks or garbles one is an error.
KvScales LoadKvScales(const std::string& quantization_param_path, const Checkpoint& checkpoint,
                      const ModelConfig& config);

}  // namespace kvanta::models
