// One model over several processes: tensor parallelism (docs/adr/0052) and pipeline parallelism (docs/adr/0056).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "kernels/cuda/cuda_context.h"
#include "kvanta/engine.h"
#include "models/config/config.h"
#include "models/model.h"
#include "parallel/communicator.h"
#include "runner/runner.h"

namespace kvanta::engine {

struct EngineComponents;

int RankCount(const EngineConfig& config) noexcept;
// Ranks of one machine, and this one's number among them.
int LocalRankCount(const EngineConfig& config) noexcept;
int LocalRank(const EngineConfig& config) noexcept;
// This rank's share of the memory that `device` has: ranks have a GPU each.
int64_t AvailableBytes(const EngineConfig& config, const Device& device);
// The option that asks for several ranks.
std::string_view RankOption(const EngineConfig& config) noexcept;

// Throws InputError for numbers of ranks, nodes and this node that do not fit together.
void CheckNodes(const EngineConfig& config);
// Throws InputError for options and models that cannot be divided among the ranks that `config` asks for, naming what
// can.
void CheckRanks(const EngineConfig& config, const models::ModelConfig& model);

// Layers of a rank of a pipeline: all ranks get about as many weights.
models::LayerRange LayersOfRank(const models::ModelConfig& model, int ranks, int rank);

// The part of the model that a rank keeps in its cache.
struct RankPart {
  models::ModelConfig model;  // with the rank's heads, or its layers
  std::vector<KvScheme> schemes;
  std::vector<int> groups;                   // KV cache group of each layer of a pipeline's rank, as in the whole model
  std::optional<models::LayerRange> layers;  // layers of this rank in a pipeline
};
// schemes: of all layers.
RankPart PartOfRank(const EngineConfig& config, const models::ModelConfig& model, const std::vector<KvScheme>& schemes,
                    int rank);

// Layouts of the caches of all ranks of a pipeline; one without.
std::vector<formats::CacheLayout> LayoutsOfRanks(const EngineConfig& config, const models::ModelConfig& model,
                                                 const std::vector<KvScheme>& schemes);
// Bytes of rank 0's cache with which no rank has more than `bytes`: all have the same numbers of records.
int64_t BudgetOfRank0(int64_t bytes, const std::vector<formats::CacheLayout>& layouts);
// Bytes that take all records of rank 0's cache.
int64_t BudgetForRecords(int64_t budget_of_rank_0, const formats::CacheLayout& rank_0, const formats::CacheLayout& own);

// Keeps the scales of a rank's KV heads, or layers.
void KeepScalesOfRank(const RankPart& part, const parallel::Communicator& ranks,
                      std::vector<formats::LayerScales>& scales);

// Starts the other ranks (EngineConfig::start_ranks) and waits until all have joined. `fingerprint`: of the weights;
// `isa`: the CPU unit that computes, or the GPU's. Throws InputError / ResourceError.
std::shared_ptr<parallel::Communicator> JoinRanks(const EngineConfig& config, const std::string& fingerprint,
                                                  const std::string& isa);

// This rank among those that divide the pages, and these; 0 and null if each has all pages.
int RankOfPages(const EngineConfig& config) noexcept;
parallel::Communicator* RanksOfPages(const EngineComponents& components) noexcept;

// Rank 0's value, on every rank.
int64_t ValueOfRank0(parallel::Communicator& ranks, int64_t value);

// Captured by all ranks, or by none.
runner::Graphs GraphsOf(const EngineComponents& components) noexcept;

// RunRank with a given GPU; null: this machine's.
void RunRank(EngineConfig config, std::shared_ptr<kernels::CudaContext> gpu);

}  // namespace kvanta::engine
