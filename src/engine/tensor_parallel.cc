#include "engine/tensor_parallel.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "base/quote.h"
#include "cache/page_pool.h"
#include "engine/components.h"
#include "engine/engine_config.h"
#include "kvanta/error.h"
#include "kvanta/version.h"
#include "parallel/gloo_communicator.h"
#include "runner/rank_steps.h"
#include "runner/runner.h"

namespace kvanta::engine {
namespace {

// Options in which ranks differ.
constexpr std::array<std::string_view, 3> kOwnOptions = {"threads", "tensor_parallel_rank", "tensor_parallel_folder"};

// A line for each thing that must be the same in all ranks.
std::string Identity(const EngineConfig& config, const std::string& fingerprint) {
  std::string text = fmt::format("version = {}\nweights = {}\n", Version(), fingerprint);
  EngineConfig::VisitOptions([&](std::string_view option, auto member, auto... /*limits*/) {
    if (std::ranges::find(kOwnOptions, option) != kOwnOptions.end()) return;
    const auto& value = config.*member;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, std::optional<bool>>) {
      text += fmt::format("{} = {}\n", option, value.has_value() ? static_cast<int>(*value) : -1);
    } else {
      text += fmt::format("{} = {}\n", option, value);
    }
  });
  return text;
}

template <class T>
std::vector<T> PartOf(const std::vector<T>& values, const parallel::Communicator& ranks) {
  const parallel::Partition part = ranks.Divide(std::ssize(values));
  return {values.begin() + part.Begin(ranks.Rank()), values.begin() + part.Begin(ranks.Rank() + 1)};
}

// A value per KV head or more; formats whose scale is one for all heads have as many.
formats::SideScales PartOf(const formats::SideScales& side, const parallel::Communicator& ranks) {
  formats::SideScales part;
  part.scale = PartOf(side.scale, ranks);
  part.mean = PartOf(side.mean, ranks);
  part.outliers = PartOf(side.outliers, ranks);
  if (side.query) {
    part.query = std::make_shared<const formats::QueryTransform>(
        PartOf(side.query->matrices(), ranks), side.query->kv_heads() / ranks.Size(), side.query->head_dim());
  }
  return part;
}

bool HasCpusForAll(const EngineConfig& config) {
  return int64_t{std::max(1, config.threads)} * config.tensor_parallel_size <= sysconf(_SC_NPROCESSORS_ONLN);
}

}  // namespace

void CheckTensorParallel(const EngineConfig& config, const models::ModelConfig& model) {
  const int size = config.tensor_parallel_size;
  if (config.tensor_parallel_rank >= size) {
    throw InputError(fmt::format("tensor_parallel_rank = {}: there are ranks 0 to {} (tensor_parallel_size)",
                                 config.tensor_parallel_rank, size - 1));
  }
  if (size == 1) return;
  const auto refuse = [&](std::string_view why) {
    throw InputError(fmt::format("tensor_parallel_size = {}: {}", size, why));
  };
  if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) refuse(missing + "; use 1");
  const bool moe = std::ranges::any_of(model.layer_specs, &models::LayerSpec::moe);
  const bool recurrent = std::ranges::any_of(model.layer_specs, &models::LayerSpec::IsRecurrent);
  const std::string_view undivided = model.UsesMla()              ? "latents, which all heads share"
                                     : recurrent                  ? "recurrent layers"
                                     : moe                        ? "experts"
                                     : model.qk_norm_of_all_heads ? "a norm over the channels of all heads"
                                                                  : "";
  if (!undivided.empty()) {
    refuse(fmt::format("{} has {}, which are not divided among ranks yet; use 1", model.architecture, undivided));
  }
  if (model.kv_heads % size != 0) {
    std::vector<int> sizes;
    for (int each = 1; each <= std::min(model.kv_heads, parallel::kMaxRanks); ++each) {
      if (model.kv_heads % each == 0) sizes.push_back(each);
    }
    refuse(fmt::format("the {} KV heads of {} do not divide among so many ranks; {} do", model.kv_heads,
                       model.architecture, fmt::join(sizes, ", ")));
  }
  if (config.device == "cuda") refuse("not supported with device cuda; there are: auto, cpu");
  if (!config.kv_cache_dir.empty()) refuse("not supported with kv_cache_dir, whose files hold the pages of all heads");
  if (!config.kv_store.empty()) refuse("not supported with kv_store, whose values hold the pages of all heads");
  if (config.quality_sample_rate > 0) refuse("not supported with quality_sample_rate; leave it out");
  if (config.calculate_kv_scales) refuse("not supported with calculate_kv_scales; give quantization_param_path");
}

models::ModelConfig ConfigOfRank(models::ModelConfig model, int ranks) {
  model.heads /= ranks;
  model.kv_heads /= ranks;
  return model;
}

formats::LayerScales ScalesOfRank(const formats::LayerScales& scales, const parallel::Communicator& ranks) {
  return {.k = PartOf(scales.k, ranks), .v = PartOf(scales.v, ranks)};
}

std::shared_ptr<parallel::Communicator> JoinRanks(const EngineConfig& config, const std::string& fingerprint) {
  if (config.tensor_parallel_size == 1) return std::make_shared<parallel::Communicator>();
  if (config.tensor_parallel_folder.empty()) {
    throw InputError(
        fmt::format("tensor_parallel_size = {}: needs tensor_parallel_folder, in which the ranks find each "
                    "other",
                    config.tensor_parallel_size));
  }
  if (config.tensor_parallel_rank == 0 && config.start_ranks) config.start_ranks();
  return parallel::JoinGloo({.rank = config.tensor_parallel_rank,
                             .size = config.tensor_parallel_size,
                             .folder = config.tensor_parallel_folder,
                             .identity = Identity(config, fingerprint),
                             .busy_poll = HasCpusForAll(config)});
}

int64_t ValueOfRank0(parallel::Communicator& ranks, int64_t value) {
  if (ranks.Alone()) return value;
  std::vector<uint8_t> message(sizeof(value));
  std::memcpy(message.data(), &value, sizeof(value));
  ranks.Broadcast(message);
  std::memcpy(&value, message.data(), sizeof(value));
  return value;
}

}  // namespace kvanta::engine

namespace kvanta {

void RunRank(EngineConfig config) {
  if (config.tensor_parallel_rank == 0) throw InputError("tensor_parallel_rank = 0: rank 0 is an Engine");
  const std::string folder = config.tensor_parallel_folder;
  const int rank = config.tensor_parallel_rank;
  try {
    config.on_warning = nullptr;  // rank 0 warns
    engine::EngineComponents components = engine::LoadComponents(std::move(config));
    const int64_t budget = engine::ValueOfRank0(*components.ranks, 0);
    cache::PagePool pool(components.ops->device(), components.layout, {.budget_bytes = budget, .borrowed = true});
    auto backend =
        components.make_backend(pool, {.layers = components.model->AttentionLayers(), .scales = components.scales});
    runner::Runner runner(*components.model, components.config.max_num_batched_tokens,
                          engine::MaxLogitRows(components.config));
    runner::FollowSteps(*components.ranks, pool, runner, *backend);
  } catch (const std::exception& error) {
    parallel::ReportLostRank(folder, rank, error.what());
    throw;
  }
}

}  // namespace kvanta
