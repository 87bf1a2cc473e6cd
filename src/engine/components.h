// What an engine is made of. Engine(config) loads these from a folder; tests put their own model in.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/profile.h"
#include "engine/scale_probe.h"
#include "formats/scheme.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/ops.h"
#include "kvanta/engine.h"
#include "models/model.h"

namespace kvanta::engine {

struct EngineComponents {
  EngineConfig config;  // resolved but for max_model_len and kv_cache_memory_bytes
  ModelInfo info;
  std::shared_ptr<ThreadPool> threads;
  std::shared_ptr<StepProfile> profile;  // null unless wanted
  std::unique_ptr<kernels::Ops> ops;     // may be null: whatever the model needs to live
  std::unique_ptr<models::Model> model;
  std::string model_identity;  // of page files
  formats::CacheLayout layout;
  std::vector<formats::LayerScales> scales;  // per layer
  int64_t positions = 0;                     // that the model was loaded for; max_model_len is not above it
  bool scales_given = true;                  // false: 1.0 stands for "nobody said"
  BackendFactory make_backend;
  std::string isa;
};

// Reads, checks and loads everything that `config` names. Throws InputError / ResourceError. gpu: what device "cuda"
// stands for; none: this machine's.
EngineComponents LoadComponents(EngineConfig config, std::shared_ptr<kernels::CudaContext> gpu = nullptr);

}  // namespace kvanta::engine
