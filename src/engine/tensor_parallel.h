// Tensor parallelism: one model over several processes (docs/adr/0052).
#pragma once

#include <memory>
#include <string>

#include "formats/scheme.h"
#include "kvanta/engine.h"
#include "models/config.h"
#include "parallel/communicator.h"

namespace kvanta::engine {

// Throws InputError for options and models that cannot be divided among config.tensor_parallel_size ranks, naming what
// can.
void CheckTensorParallel(const EngineConfig& config, const models::ModelConfig& model);

// The model with the heads of one rank, for the shapes of its cache.
models::ModelConfig ConfigOfRank(models::ModelConfig model, int ranks);

// The scales of a rank's KV heads.
formats::LayerScales ScalesOfRank(const formats::LayerScales& scales, const parallel::Communicator& ranks);

// Starts the other ranks (EngineConfig::start_ranks) and waits until all have joined. `fingerprint`: of the weights.
// Throws InputError / ResourceError.
std::shared_ptr<parallel::Communicator> JoinRanks(const EngineConfig& config, const std::string& fingerprint);

// Rank 0's value, on every rank.
int64_t ValueOfRank0(parallel::Communicator& ranks, int64_t value);

}  // namespace kvanta::engine
