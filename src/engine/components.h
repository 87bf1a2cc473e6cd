// Components of an engine. Engine(config) loads them from a folder; tests provide a GPU or change them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/draft_proposer.h"
#include "formats/scheme.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/ops.h"
#include "kvanta/engine.h"
#include "models/dense_modules.h"
#include "models/model.h"
#include "observe/profile.h"
#include "observe/scale_probe.h"
#include "parallel/communicator.h"

namespace kvanta::engine {

struct EngineComponents {
  EngineConfig config;  // resolved, except max_model_len and kv_cache_memory_bytes
  ModelInfo info;
  std::shared_ptr<parallel::Communicator> ranks = std::make_shared<parallel::Communicator>();
  std::shared_ptr<ThreadPool> threads;
  std::shared_ptr<observe::StepProfile> profile;  // null without EngineConfig::profile
  std::unique_ptr<kernels::Ops> ops;              // operations that the model was loaded with
  std::unique_ptr<models::Model> model;
  std::vector<models::DenseModule> dense_modules;  // of embeddings
  std::string model_identity;                      // identity in page files
  std::string weights_hash;  // hash of weights and config.json; only with EngineConfig::kv_cache_dir or kv_store
  std::string kv_store;      // with its password; config.kv_store is without
  formats::CacheLayout layout;
  formats::CacheLayout layout_of_rank_0;     // with several ranks
  std::vector<formats::LayerScales> scales;  // per layer
  int64_t positions = 0;                     // for which the model was loaded; at least max_model_len
  bool scales_given = true;                  // false: 1.0 is only the default
  observe::BackendFactory make_backend;
  std::unique_ptr<DraftProposer> proposer;  // null: no speculative decoding
  int num_speculative_tokens = 0;           // maximum draft tokens of a sequence in a step
  std::optional<float> draft_cost;          // for tests: that of MinAcceptance, which is measured otherwise
  std::string isa;
  // For tests: those of store::RecordStoreConfig.
  std::function<void()> before_read, before_write;
  Clock now = Now;
  double answer_seconds = 1;
};

// Reads, checks and loads everything that `config` names. Throws InputError / ResourceError. gpu: the GPU of device
// "cuda"; null: this machine's.
EngineComponents LoadComponents(EngineConfig config, std::shared_ptr<kernels::CudaContext> gpu = nullptr);

}  // namespace kvanta::engine
