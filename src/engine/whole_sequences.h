// Models whose tokens attend to later ones: every sequence is computed in one step.
#pragma once

#include "kvanta/engine.h"
#include "models/config/config.h"

namespace kvanta::engine {

// For such a model: turns prefix caching off, and lets a step take the longest context. Throws InputError for options
// that need causal attention.
void ComputeSequencesWhole(const models::ModelConfig& model, EngineConfig& config);

}  // namespace kvanta::engine
