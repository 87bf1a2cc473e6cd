#include "engine/ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "base/math.h"
#include "cache/page_pool.h"
#include "engine/components.h"
#include "engine/engine_config.h"
#include "kvanta/error.h"
#include "kvanta/rank_lost_error.h"
#include "kvanta/version.h"
#include "models/weight_count.h"
#include "parallel/gloo_communicator.h"
#include "parallel/rank_files.h"
#include "runner/rank_steps.h"
#include "runner/runner.h"

namespace kvanta::engine {
namespace {

// Options in which ranks may differ: their own, paths of what is compared by its content, and what concerns rank 0
// alone.
constexpr std::array<std::string_view, 12> kOwnOptions = {"threads",
                                                          "rank",
                                                          "rank_folder",
                                                          "rank_address",
                                                          "node_rank",
                                                          "master_addr",
                                                          "master_port",
                                                          "model",
                                                          "quantization_param_path",
                                                          "kv_events_queue_size",
                                                          "eos_token_ids",
                                                          "max_queued_requests"};

// A line for each thing that must be the same in all ranks.
std::string Identity(const EngineConfig& config, const std::string& fingerprint, const std::string& isa) {
  // Units round differently: tokens would depend on the division.
  std::string text = fmt::format("version = {}\nweights = {}\nisa = {}\n", Version(), fingerprint, isa);
  EngineConfig::VisitOptions([&](std::string_view option, auto member, auto... /*limits*/) {
    if (std::ranges::find(kOwnOptions, option) != kOwnOptions.end()) return;
    const auto& value = config.*member;
    if constexpr (requires { value.has_value(); }) {
      text += value ? fmt::format("{} = {}\n", option, *value) : fmt::format("{} = none\n", option);
    } else {
      text += fmt::format("{} = {}\n", option, value);
    }
  });
  return text;
}

// Values of this rank's KV heads, of which there are as many for each of `all`.
template <class T>
std::vector<T> PartOf(const std::vector<T>& values, size_t all, const parallel::Communicator& ranks) {
  const parallel::KvHeads own = ranks.OwnKvHeads(static_cast<int>(all));
  const auto of_head = static_cast<std::ptrdiff_t>(values.size() / all);
  const auto first = values.begin() + own.first * of_head;
  return {first, first + own.count * of_head};
}

// A value per KV head or more; formats whose scale is one for all heads have as many.
formats::SideScales PartOf(const formats::SideScales& side, const parallel::Communicator& ranks) {
  formats::SideScales part;
  const size_t heads = side.scale.size();
  part.scale = PartOf(side.scale, heads, ranks);
  part.mean = PartOf(side.mean, heads, ranks);
  part.outliers = PartOf(side.outliers, heads, ranks);
  if (side.query) {
    part.query = std::make_shared<const formats::QueryTransform>(
        PartOf(side.query->matrices(), heads, ranks), static_cast<int>(part.scale.size()), side.query->head_dim(),
        PartOf(side.query->allocations(), heads, ranks));
  }
  return part;
}

bool HasCpusForAll(const EngineConfig& config) {
  return int64_t{std::max(1, config.threads)} * LocalRankCount(config) <= sysconf(_SC_NPROCESSORS_ONLN);
}

}  // namespace

int RankCount(const EngineConfig& config) noexcept {
  return config.tensor_parallel_size * config.pipeline_parallel_size;
}

int LocalRankCount(const EngineConfig& config) noexcept {
  return RankCount(config) / config.nnodes;
}

int LocalRank(const EngineConfig& config) noexcept {
  return config.rank - config.node_rank * LocalRankCount(config);
}

int64_t AvailableBytes(const EngineConfig& config, const Device& device) {
  return device.AvailableBytes() / (config.device == "cuda" ? 1 : LocalRankCount(config));
}

std::string_view RankOption(const EngineConfig& config) noexcept {
  return config.pipeline_parallel_size > 1 ? "pipeline_parallel_size" : "tensor_parallel_size";
}

models::LayerRange LayersOfRank(const models::ModelConfig& model, int ranks, int rank) {
  const models::WeightCount weights = models::CountWeights(model);
  // Embedding and output head, which rank 0 has, in layers of as many weights.
  const auto others =
      std::llround(static_cast<double>(weights.embeddings) * model.layers / static_cast<double>(weights.matrices));
  const auto begin = [&](int64_t of) {
    if (of == 0 || of == ranks) return of == 0 ? 0 : model.layers;
    const int64_t even = (model.layers + others) * of / ranks - others;
    return static_cast<int>(std::clamp<int64_t>(even, of, model.layers - (ranks - of)));
  };
  return {.first = begin(rank), .count = begin(rank + 1) - begin(rank)};
}

RankPart PartOfRank(const EngineConfig& config, const models::ModelConfig& model, const std::vector<KvScheme>& schemes,
                    int rank) {
  if (config.pipeline_parallel_size == 1) {
    RankPart part{.model = model, .schemes = schemes, .groups = {}, .layers = {}};
    part.model.heads /= config.tensor_parallel_size;
    for (models::LayerSpec& layer : part.model.layer_specs) layer.heads /= config.tensor_parallel_size;
    if (model.UsesMla()) return part;
    const auto divide = [&](int& heads) {
      heads = parallel::KvHeadsOfRank(heads, rank, config.tensor_parallel_size).count;
    };
    divide(part.model.kv_heads);
    for (models::LayerSpec& layer : part.model.layer_specs) divide(layer.kv_heads);
    return part;
  }
  const models::LayerRange own = LayersOfRank(model, config.pipeline_parallel_size, rank);
  const std::vector<int> groups = GroupsOf(schemes, model);
  return {.model = models::ConfigOfLayers(model, own.first, own.count),
          .schemes = {schemes.begin() + own.first, schemes.begin() + own.End()},
          .groups = {groups.begin() + own.first, groups.begin() + own.End()},
          .layers = own};
}

std::vector<formats::CacheLayout> LayoutsOfRanks(const EngineConfig& config, const models::ModelConfig& model,
                                                 const std::vector<KvScheme>& schemes) {
  std::vector<formats::CacheLayout> layouts;
  for (int rank = 0; rank < config.pipeline_parallel_size; ++rank) {
    const RankPart part = PartOfRank(config, model, schemes, rank);
    layouts.push_back(PlanLayout(part.schemes, part.model, config.page_size, StateRoundingOf(config), part.groups));
  }
  return layouts;
}

int64_t BudgetOfRank0(int64_t bytes, const std::vector<formats::CacheLayout>& layouts) {
  double share = 1;
  for (const formats::CacheLayout& layout : layouts) {
    for (size_t group = 0; group < layout.groups.size(); ++group) {
      for (const cache::PageKind kind : cache::kPageKinds) {
        const int64_t smaller = cache::BytesOf(layouts.front().groups[group], kind);
        const int64_t larger = cache::BytesOf(layout.groups[group], kind);
        if (smaller < larger) share = std::min(share, static_cast<double>(smaller) / static_cast<double>(larger));
      }
    }
  }
  return static_cast<int64_t>(static_cast<double>(bytes) * share);
}

int64_t BudgetForRecords(int64_t budget_of_rank_0, const formats::CacheLayout& rank_0,
                         const formats::CacheLayout& own) {
  int64_t factor = 1;
  for (size_t group = 0; group < own.groups.size(); ++group) {
    for (const cache::PageKind kind : cache::kPageKinds) {
      const int64_t first = cache::BytesOf(rank_0.groups[group], kind);
      if (first > 0) factor = std::max(factor, CeilDiv(cache::BytesOf(own.groups[group], kind), first));
    }
  }
  return factor * budget_of_rank_0;
}

void KeepScalesOfRank(const RankPart& part, const parallel::Communicator& ranks,
                      std::vector<formats::LayerScales>& scales) {
  if (part.layers) {
    scales = {scales.begin() + part.layers->first, scales.begin() + part.layers->End()};
  } else if (!part.model.UsesMla()) {  // latents have none
    for (formats::LayerScales& layer : scales) layer = {.k = PartOf(layer.k, ranks), .v = PartOf(layer.v, ranks)};
  }
}

std::shared_ptr<parallel::Communicator> JoinRanks(const EngineConfig& config, const std::string& fingerprint,
                                                  const std::string& isa) {
  if (RankCount(config) == 1) return std::make_shared<parallel::Communicator>();
  if (config.rank_folder.empty()) {
    throw InputError(fmt::format("{} ranks need rank_folder, in which they find each other", RankCount(config)));
  }
  if (config.rank == 0 && config.start_ranks) config.start_ranks();
  return parallel::JoinGloo({.rank = config.rank,
                             .size = RankCount(config),
                             .folder = config.rank_folder,
                             .address = config.rank_address,
                             .other_machines = config.nnodes > 1,
                             .identity = Identity(config, fingerprint, isa),
                             .busy_poll = HasCpusForAll(config),
                             .timeout = std::chrono::seconds(config.distributed_timeout_seconds)});
}

int RankOfPages(const EngineConfig& config) noexcept {
  return config.decode_context_parallel_size > 1 ? config.rank : 0;
}

parallel::Communicator* RanksOfPages(const EngineComponents& components) noexcept {
  return components.config.decode_context_parallel_size > 1 ? components.ranks.get() : nullptr;
}

int64_t ValueOfRank0(parallel::Communicator& ranks, int64_t value) {
  if (ranks.IsSingleRank()) return value;
  std::vector<uint8_t> message(sizeof(value));
  std::memcpy(message.data(), &value, sizeof(value));
  ranks.Broadcast(message);
  if (message.size() != sizeof(value)) {
    throw RankLostError(0, ranks.Size(), fmt::format("it sent {} bytes instead of a number", message.size()));
  }
  std::memcpy(&value, message.data(), sizeof(value));
  return value;
}

runner::Graphs GraphsOf(const EngineComponents& components) noexcept {
  if (components.config.enforce_eager || !components.ranks->CanCaptureGathers()) return runner::Graphs::kNone;
  return components.ranks->IsSingleRank() ? runner::Graphs::kIfMemory : runner::Graphs::kRequired;
}

namespace {

// Rank 0 knows the memory of its own machine and GPU.
void CheckMemory(int64_t budget, const EngineComponents& components) {
  const Device& device = components.ops->device();
  const int64_t available = AvailableBytes(components.config, device);
  if (budget <= available) return;
  throw ResourceError(fmt::format(
      "a KV cache of {} bytes for each rank; rank {} has {} of the memory of {} for it (kv_cache_memory_bytes)", budget,
      components.config.rank, available, device.Name()));
}

}  // namespace

void RunRank(EngineConfig config, std::shared_ptr<kernels::CudaContext> gpu) {
  if (config.rank == 0) throw InputError("rank = 0: rank 0 is an Engine");
  const std::string folder = config.rank_folder;
  const int rank = config.rank;
  try {
    config.on_warning = nullptr;  // rank 0 warns
    EngineComponents components = LoadComponents(std::move(config), std::move(gpu));
    const int64_t budget =
        BudgetForRecords(ValueOfRank0(*components.ranks, 0), components.layout_of_rank_0, components.layout);
    if (components.config.nnodes > 1 || components.config.device == "cuda") CheckMemory(budget, components);
    cache::PagePool pool(components.ops->device(), components.layout,
                         {.budget_bytes = budget,
                          .borrowed = true,
                          .ranks = components.config.decode_context_parallel_size,
                          .rank = RankOfPages(components.config)});
    auto backend = components.make_backend(pool, {.layers = components.model->AttentionLayers(),
                                                  .scales = components.scales,
                                                  .ranks = RanksOfPages(components)});
    runner::Runner runner(*components.model, components.config.max_num_batched_tokens, MaxLogitRows(components.config),
                          GraphsOf(components));
    if (components.config.pipeline_parallel_size > 1) runner.SetPipeline(*components.ranks);
    runner::FollowSteps(*components.ranks, pool, runner, *backend, components.model->ops().threads());
  } catch (const RankLostError& error) {
    parallel::ReportRankLoss(folder, rank, {.rank = error.Rank(), .reason = error.Reason()});
    throw;
  } catch (const std::exception& error) {
    parallel::ReportRankLoss(folder, rank, {.rank = rank, .reason = error.what()});
    throw;
  }
}

}  // namespace kvanta::engine

namespace kvanta {

void RunRank(EngineConfig config) {
  engine::RunRank(std::move(config), nullptr);
}

}  // namespace kvanta
