// Numbers of ranks and nodes, and what cannot be divided among them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "attention/page_classes.h"
#include "cache/kv_cache_spec.h"
#include "engine/engine_config.h"
#include "engine/ranks.h"
#include "kvanta/error.h"
#include "parallel/gloo_communicator.h"

namespace kvanta::engine {
namespace {

// Refuses an option of several ranks, and names it.
[[noreturn]] void Refuse(std::string_view option, int size, std::string_view why) {
  throw InputError(fmt::format("{} = {}: {}", option, size, why));
}

// True if ranks can have as many heads each, and each the KV heads of its own. All heads of MLA read the same latents,
// which every rank keeps, or whose pages ranks divide.
bool DividesHeads(const models::ModelConfig& model, int ranks) {
  return std::ranges::all_of(model.layer_specs, [&](const models::LayerSpec& layer) {
    return layer.heads % ranks == 0 && (model.UsesMla() || layer.kv_heads % ranks == 0 || ranks % layer.kv_heads == 0);
  });
}

void CheckTensorParallel(const EngineConfig& config, const models::ModelConfig& model) {
  const int size = config.tensor_parallel_size;
  const auto refuse = [&](std::string_view why) { Refuse("tensor_parallel_size", size, why); };
  const bool recurrent = std::ranges::any_of(model.layer_specs, &models::LayerSpec::IsRecurrent);
  const std::string_view undivided = recurrent                                ? "recurrent layers"
                                     : model.hidden_size_per_layer_input != 0 ? "per-layer embeddings"
                                     : model.qk_norm == models::QkNorm::kAllHeads
                                         ? "a norm over the channels of all heads"
                                     : model.qk_norm == models::QkNorm::kOwnWeights ? "norm weights of each head"
                                                                                    : "";
  if (!undivided.empty()) {
    refuse(fmt::format("{} has {}, which are not divided among ranks yet; use 1, or pipeline_parallel_size",
                       model.architecture, undivided));
  }
  if (!DividesHeads(model, size)) {
    std::vector<int> sizes;
    for (int each = 1; each <= std::min(model.heads, parallel::kMaxRanks); ++each) {
      if (DividesHeads(model, each)) sizes.push_back(each);
    }
    const std::string heads = model.UsesMla() ? fmt::format("{} heads", model.heads)
                                              : fmt::format("{} heads and {} KV heads", model.heads, model.kv_heads);
    refuse(fmt::format("the {} of {} do not divide among so many ranks; {} do", heads, model.architecture,
                       fmt::join(sizes, ", ")));
  }
  if (config.enable_expert_parallel && model.moe.num_experts > 0 && model.moe.num_experts < size) {
    refuse(fmt::format("enable_expert_parallel would leave ranks without one of the {} experts of {}; leave it out",
                       model.moe.num_experts, model.architecture));
  }
}

// Refuses what ranks with GPUs do not divide.
void CheckGpuRanks(const EngineConfig& config, const models::ModelConfig& model) {
  if (config.pipeline_parallel_size > 1) {
    Refuse("pipeline_parallel_size", config.pipeline_parallel_size,
           "not supported with device cuda; use tensor_parallel_size, or device cpu");
  }
  if (config.decode_context_parallel_size > 1) {
    Refuse("decode_context_parallel_size", config.decode_context_parallel_size,
           "not supported with device cuda; use 1, or device cpu");
  }
  if (config.enable_expert_parallel && model.moe.num_experts > 0) {
    throw InputError(
        "enable_expert_parallel: not supported with device cuda, where ranks divide each expert; leave it out");
  }
  if (config.kv_offload_bytes > 0) {
    Refuse("tensor_parallel_size", config.tensor_parallel_size,
           "not supported with kv_offload_bytes, which keeps whole pages; leave it out");
  }
}

bool HaveSamePages(const cache::KvCacheGroup& a, const cache::KvCacheGroup& b) {
  return a.quantized_while_open == b.quantized_while_open && a.exact_while_open == b.exact_while_open &&
         a.exact_before == b.exact_before && a.quantized_from == b.quantized_from && a.sink_pages == b.sink_pages &&
         a.ages == b.ages;
}

void CheckContextParallel(const EngineConfig& config, const models::ModelConfig& model) {
  const int size = config.decode_context_parallel_size;
  const auto refuse = [&](std::string_view why) { Refuse("decode_context_parallel_size", size, why); };
  if (size != config.tensor_parallel_size) {
    refuse(fmt::format("must be 1 or tensor_parallel_size, {}", config.tensor_parallel_size));
  }
  if (attention::kLatentClasses % size != 0) {
    refuse(fmt::format("pages are divided among 1, 2 or {} ranks", attention::kLatentClasses));
  }
  if (!model.UsesMla()) {
    refuse(fmt::format("{} has no latents (MLA), and tensor_parallel_size divides its KV heads; use 1",
                       model.architecture));
  }
  if (model.indexer.topk != 0 && !model.SharesKv()) {
    refuse(
        fmt::format("{} has sparse attention, whose pages are not divided among ranks yet; use 1", model.architecture));
  }
  const std::vector<KvScheme> schemes = ResolveSchemes(config, model, ResolveDType(config.dtype, model));
  if (std::ranges::any_of(schemes, [](const KvScheme& scheme) { return !scheme.ages.empty(); })) {
    refuse("not supported with a precision that depends on age; use 1");
  }
}

// True if every rank has layers, and some of each KV cache group, and rank 0, which allocates pages for all, has layers
// that need all kinds of them.
bool DividesLayers(const EngineConfig& config, const models::ModelConfig& model, int ranks) {
  if (ranks > model.layers) return false;
  EngineConfig divided = config;
  divided.pipeline_parallel_size = ranks;
  const std::vector<KvScheme> schemes = ResolveSchemes(config, model, ResolveDType(config.dtype, model));
  const cache::KvCacheSpec whole(PlanLayout(schemes, model, config.page_size, {}), LayerVisibility(model));
  for (int rank = 0; rank < ranks; ++rank) {
    const RankPart part = PartOfRank(divided, model, schemes, rank);
    if (part.model.layer_specs.front().shares_input) return false;
    const cache::KvCacheSpec own(PlanLayout(part.schemes, part.model, config.page_size, {}, part.groups),
                                 LayerVisibility(part.model));
    if (own.groups.size() < whole.groups.size()) return false;
    for (size_t group = 0; group < whole.groups.size(); ++group) {
      if (own.groups[group].layers.empty()) return false;
      if (rank == 0 && !HaveSamePages(own.groups[group], whole.groups[group])) return false;
    }
  }
  return true;
}

void CheckPipelineParallel(const EngineConfig& config, const models::ModelConfig& model) {
  const int size = config.pipeline_parallel_size;
  const auto refuse = [&](std::string_view why) { Refuse("pipeline_parallel_size", size, why); };
  if (config.tensor_parallel_size > 1) {
    refuse(fmt::format("not supported together with tensor_parallel_size = {}; use one of them",
                       config.tensor_parallel_size));
  }
  if (model.SharesKv()) {
    refuse(fmt::format(
        "{} has compressed keys and values, which are not divided among the ranks of a pipeline yet; use 1, or "
        "tensor_parallel_size",
        model.architecture));
  }
  if (model.KvLayers() != model.layers || model.hidden_size_per_layer_input != 0) {
    refuse(
        fmt::format("layers of {} use keys and values of earlier ones, or embeddings of their own, which are not "
                    "divided among ranks yet; use 1",
                    model.architecture));
  }
  if (model.indexer.topk != 0) {
    refuse(
        fmt::format("layers of {} have indexers, whose keys are not divided among the ranks of a pipeline yet; use "
                    "1, or tensor_parallel_size",
                    model.architecture));
  }
  if (DividesLayers(config, model, size)) return;
  std::vector<int> sizes;
  for (int each = 1; each <= parallel::kMaxRanks; ++each) {
    if (DividesLayers(config, model, each)) sizes.push_back(each);
  }
  refuse(
      fmt::format("the {} layers of {} do not divide among so many ranks with all kinds of cache pages in each; {} do",
                  model.layers, model.architecture, fmt::join(sizes, ", ")));
}

}  // namespace

void CheckNodes(const EngineConfig& config) {
  const int size = RankCount(config);
  if (size % config.nnodes != 0) {
    throw InputError(
        fmt::format("nnodes = {}: does not divide the {} ranks (tensor_parallel_size, pipeline_parallel_size)",
                    config.nnodes, size));
  }
  if (config.node_rank >= config.nnodes) {
    throw InputError(
        fmt::format("node_rank = {}: there are nodes 0 to {} (nnodes)", config.node_rank, config.nnodes - 1));
  }
}

void CheckRanks(const EngineConfig& config, const models::ModelConfig& model) {
  const int size = RankCount(config);
  if (config.rank >= size) {
    throw InputError(fmt::format("rank = {}: there are ranks 0 to {} (tensor_parallel_size, pipeline_parallel_size)",
                                 config.rank, size - 1));
  }
  CheckNodes(config);
  if (config.decode_context_parallel_size > 1) CheckContextParallel(config, model);
  if (size == 1) return;
  if (config.pipeline_parallel_size > 1) {
    CheckPipelineParallel(config, model);
  } else {
    CheckTensorParallel(config, model);
  }
  const auto refuse = [&](std::string_view why) { Refuse(RankOption(config), size, why); };
  if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) refuse(missing + "; use 1");
  if (config.device == "cuda") CheckGpuRanks(config, model);
  if (!config.kv_cache_dir.empty()) refuse("not supported with kv_cache_dir, whose files hold whole pages");
  if (!config.kv_store.empty()) refuse("not supported with kv_store, whose values hold whole pages");
  if (config.quality_sample_rate > 0) refuse("not supported with quality_sample_rate; leave it out");
  const std::vector<KvScheme> schemes = ResolveSchemes(config, model, ResolveDType(config.dtype, model));
  if (std::ranges::any_of(schemes, &KvScheme::HasFloor)) refuse("not supported with kv_cache_floor; leave it out");
  if (config.calculate_kv_scales) refuse("not supported with calculate_kv_scales; give quantization_param_path");
}

}  // namespace kvanta::engine
