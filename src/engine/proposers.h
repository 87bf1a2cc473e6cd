// Proposers of draft tokens, as EngineConfig::speculative_config asks for them.
#pragma once

#include <optional>

#include "engine/components.h"
#include "engine/speculative_config.h"
#include "models/config/config.h"

namespace kvanta::engine {

// A draft model, or the model's own predictor (MTP), before its weights are loaded.
struct DraftModelPlan {
  EngineConfig config;  // the engine's, for the draft model
  models::ModelConfig model;
  formats::CacheLayout layout;
  cache::KvCacheSpec spec;
};

// Checks speculative_config against `target`. Returns the plan of the draft model or of MTP if it names one. Throws
// InputError.
std::optional<DraftModelPlan> PlanSpeculation(const EngineConfig& config, const models::ModelConfig& target);

// Draft tokens of a step, at most; 0 without speculative_config.
int64_t MaxDraftRows(const EngineConfig& config);

// Sets the proposer that `config` asks for, with `plan` of the same config, in components whose model is loaded. Throws
// InputError / ResourceError.
void AddProposer(const EngineConfig& config, std::optional<DraftModelPlan> plan, EngineComponents& components);

}  // namespace kvanta::engine
