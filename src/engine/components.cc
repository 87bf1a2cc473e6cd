#include "engine/components.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>

#include "attention/backends.h"
#include "attention/gpu_backend.h"
#include "base/device.h"
#include "base/quote.h"
#include "engine/engine_config.h"
#include "engine/proposers.h"
#include "engine/ranks.h"
#include "engine/whole_sequences.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/cuda/gpu_communicator.h"
#include "kvanta/error.h"
#include "models/blocks/rope.h"
#include "models/fingerprint.h"
#include "models/kv_scales.h"
#include "store/redis_server.h"

namespace kvanta::engine {
namespace {

// The GPU of device "cuda": `given`, or this machine's. Throws InputError naming what is missing.
std::shared_ptr<kernels::CudaContext> FindGpu(const EngineConfig& config, std::shared_ptr<kernels::CudaContext> given) {
  const auto refuse = [](std::string_view why) {
    throw InputError(fmt::format("device cuda: {}; there are: auto, cpu", why));
  };
  if (config.profile)
    refuse("profile is not supported: a GPU's operations run asynchronously, so that the host cannot time them");
  if (config.isa != "auto") refuse(fmt::format("isa {} selects a CPU unit", Quote(config.isa)));
  if (given) return given;
  const int ranks = LocalRankCount(config);
  const std::string missing = ranks == 1 ? kernels::MissingForCuda() : kernels::MissingForCuda(ranks);
  if (!missing.empty()) refuse(missing);
  return kernels::MakeCudaContext(ranks == 1 ? kernels::kBestGpu : LocalRank(config));
}

// The layers whose scheme is not `base`, as kv_cache_dtype_layers has them.
std::string LayerOverrides(const std::vector<KvScheme>& schemes, const KvScheme& base) {
  std::vector<std::string> entries;
  for (size_t first = 0, end = 0; first < schemes.size(); first = end) {
    while (end < schemes.size() && schemes[end] == schemes[first]) ++end;
    if (schemes[first] == base) continue;
    const std::string layers = end == first + 1 ? fmt::to_string(first) : fmt::format("{}-{}", first, end - 1);
    entries.push_back(fmt::format("{}={}", layers, schemes[first].ToString()));
  }
  return fmt::format("{}", fmt::join(entries, ";"));
}

// docs/adr/0025
void WarnOfLongFactors(const EngineConfig& config, const models::ModelConfig& model, int64_t positions) {
  if (!config.on_warning) return;
  const int64_t original = model.layer_specs.front().rope.original_max_position;
  config.on_warning(
      fmt::format("max_model_len = {}: all sequences get the rope factors for contexts of more than {} tokens "
                  "(long_factor); a max_model_len of up to {} takes those for short ones",
                  positions, original, original));
}

void WarnOfBoundaryLayers(const EngineConfig& config, const models::ModelConfig& model, DType dtype) {
  const int layers = ResolveBaseScheme(config, model, dtype).boundary_layers;
  if (layers == 0 || !config.on_warning) return;
  config.on_warning(fmt::format("kv_cache_dtype = {}: the first and last {} layers stay in bf16; +edges=0 takes all",
                                Quote(config.kv_cache_dtype), layers));
}

// Sets the KV scales of all layers, for the layout of the components.
void LoadScales(const EngineConfig& config, const models::ModelConfig& model, const weights::Checkpoint& checkpoint,
                EngineComponents& components) {
  components.scales = models::UnitScales(model);
  if (components.layout.UsesScales()) {
    models::KvScales found =
        models::LoadKvScales(config.quantization_param_path, checkpoint, model,
                             {.layers = components.layout.layers, .measured = config.calculate_kv_scales});
    if (!found.note.empty() && config.on_warning) config.on_warning(found.note);
    components.scales_given = found.source != models::ScaleSource::kNone;
    components.scales = std::move(found.layers);
  } else if (!config.quantization_param_path.empty()) {
    // Checked all the same: a typo in the format's name would otherwise drop the file silently.
    models::LoadKvScales(config.quantization_param_path, checkpoint, model);
    if (config.on_warning) {
      config.on_warning(fmt::format("quantization_param_path = {}: not used, no layer's format has static scales",
                                    Quote(config.quantization_param_path)));
    }
  }
  components.scales.resize(components.layout.layers.size());  // keys of indexers have none
}

// Joins the other ranks, and reduces layout and scales to this rank's part. gpu: null on the CPU.
void JoinAsRank(const RankPart& part, const models::ModelConfig& model, const std::vector<KvScheme>& schemes,
                const std::shared_ptr<kernels::CudaContext>& gpu, EngineConfig& config, EngineComponents& components) {
  // Graphs are captured in the same steps where schedules of attention, and so the plans of steps, have the same sizes.
  const std::string unit =
      gpu ? fmt::format("{} with {} multiprocessors", components.isa, gpu->Multiprocessors()) : components.isa;
  components.ranks = JoinRanks(config, components.model_identity, unit);
  if (gpu) {
    components.ranks =
        kernels::MakeGpuCommunicator({.gpu = gpu,
                                      .host = components.ranks,
                                      .timeout = std::chrono::seconds(config.distributed_timeout_seconds),
                                      .on_warning = config.on_warning});
  }
  KeepScalesOfRank(part, *components.ranks, components.scales);
  const std::vector<formats::CacheLayout> layouts = LayoutsOfRanks(config, model, schemes);
  components.layout = part.layers ? layouts[static_cast<size_t>(config.rank)] : layouts.front();
  components.layout_of_rank_0 = layouts.front();
  config.kv_cache_memory_bytes = BudgetOfRank0(config.kv_cache_memory_bytes, layouts);
}

// gpu: null for the CPU, whose unit is `isa`.
observe::BackendFactory MakeBackendFactory(const std::string& isa, std::shared_ptr<kernels::CudaContext> gpu,
                                           std::shared_ptr<ThreadPool> threads) {
  if (gpu) {
    return [gpu = std::move(gpu)](cache::PagePool& pages, attention::BackendConfig setup) {
      return attention::MakeGpuBackend(pages, std::move(setup), gpu);
    };
  }
  return
      [threads = std::move(threads), backend = "cpu-" + isa](cache::PagePool& pages, attention::BackendConfig setup) {
        return attention::MakeBackend(backend, pages, std::move(setup), threads);
      };
}

// Replaces "auto" by the formats that it stood for.
void ResolveCacheFormats(const models::ModelConfig& model, DType dtype, const std::vector<KvScheme>& schemes,
                         EngineConfig& config) {
  if (config.kv_cache_dtype == "auto") {
    config.kv_cache_dtype =
        model.declared_kv_cache.empty() ? std::string(UnquantizedScheme(dtype)) : model.declared_kv_cache;
    if (!model.declared_kv_cache_layers.empty()) {
      config.kv_cache_dtype_layers = LayerOverrides(schemes, KvScheme::Parse(config.kv_cache_dtype));
    }
  }
  if (model.UsesMla()) config.kv_cache_dtype = ResolveBaseScheme(config, model, dtype).ToString();
}

}  // namespace

EngineComponents LoadComponents(EngineConfig config, std::shared_ptr<kernels::CudaContext> gpu) {
  CheckConfig(config);
  const models::ModelConfig model = models::ReadConfig(config.model);
  ComputeSequencesWhole(model, config);
  CheckRanks(config, model);
  const DType dtype = ResolveDType(config.dtype, model);
  const kernels::WeightType weight_type = ResolveWeights(config.weight_dtype, dtype);
  const std::vector<KvScheme> schemes = ResolveSchemes(config, model, dtype);
  WarnOfBoundaryLayers(config, model, dtype);
  if (config.kv_cache_dtype == "auto" && !model.kv_cache_note.empty() && config.on_warning) {
    config.on_warning(model.kv_cache_note);
  }

  EngineComponents components;
  std::optional<DraftModelPlan> draft = PlanSpeculation(config, model);
  components.layout = PlanLayout(schemes, model, config.page_size, StateRoundingOf(config));
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(config.model);
  const bool keep_types = KeepsTypes(config.dtype, config.weight_dtype, checkpoint);
  components.model_identity = models::Fingerprint(checkpoint);
  components.kv_store = config.kv_store;
  config.kv_store = store::RedactUrl(config.kv_store);
  if (!config.kv_cache_dir.empty() || !config.kv_store.empty()) {
    components.weights_hash = models::ContentHash(checkpoint, models::ReadConfigText(config.model));
  }
  LoadScales(config, model, checkpoint, components);
  const RankPart part = PartOfRank(config, model, schemes, config.rank);
  gpu = config.device == "cuda" ? FindGpu(config, std::move(gpu)) : nullptr;
  components.isa = gpu ? gpu->Name() : kernels::SelectedIsa(config.isa);
  if (RankCount(config) > 1) JoinAsRank(part, model, schemes, gpu, config, components);
  components.threads = std::make_shared<ThreadPool>(config.threads);
  components.ops = gpu ? kernels::MakeGpuOps(gpu, components.threads)
                       : kernels::MakeCpuOps(components.threads, components.isa.c_str());
  if (config.profile) {
    components.profile = std::make_shared<observe::StepProfile>();
    components.ops = observe::Profiled(std::move(components.ops), components.profile);
  }
  // The rope table is made for what the cache can hold at most; a model may claim any number of positions.
  const cache::KvCacheSpec spec(components.layout, LayerVisibility(part.model), config.decode_context_parallel_size);
  const int64_t available = AvailableBytes(config, components.ops->device());
  const bool is_rank_0 = config.rank == 0;
  const CacheSpecs specs{.target = spec, .draft = draft ? &draft->spec : nullptr};
  components.positions = ValueOfRank0(
      *components.ranks, is_rank_0 ? SizeCache(config, specs, model.max_position, available).max_model_len : 0);
  components.model = models::Load(config.model, *components.ops,
                                  {.store = weight_type,
                                   .keep_types = keep_types,
                                   .keep_quantized = KeepsQuantized(config.weight_dtype, dtype),
                                   .max_rows = config.max_num_batched_tokens,
                                   .max_draft_rows = MaxDraftRows(config),
                                   .max_positions = components.positions,
                                   .ranks = part.layers ? nullptr : components.ranks.get(),
                                   .expert_parallel = config.enable_expert_parallel,
                                   .layers = part.layers});
  components.ranks->WaitForAll();
  components.make_backend = MakeBackendFactory(components.isa, gpu, components.threads);
  AddProposer(config, std::move(draft), components);

  components.info = MakeModelInfo(model, dtype, config.weight_dtype);
  components.info.weight_bytes = components.model->WeightBytes();  // with the padding of packed weights
  components.info.hash = components.model_identity;
  components.dense_modules = models::ReadDenseModules(config.model, model.hidden, *components.ops);
  if (!components.dense_modules.empty()) {
    components.info.embedding_size = static_cast<int>(components.dense_modules.back().out);
  }
  for (const int32_t token : config.eos_token_ids) {
    std::vector<int32_t>& known = components.info.eos_token_ids;
    if (std::ranges::find(known, token) == known.end()) known.push_back(token);
  }
  if (models::UsesLongFactors(model, components.positions)) {
    // Keys are rotated by other angles than in an engine for short contexts: the pages of one are not the other's.
    components.model_identity += "+long_factor";
    WarnOfLongFactors(config, model, components.positions);
  }
  config.dtype = components.info.dtype;
  const bool is_quantized = model.quantization.method != weights::QuantMethod::kNone;
  if (weight_type == kernels::WeightType::kBf16 && !keep_types && !is_quantized) config.weight_dtype = "bf16";
  config.device = gpu ? "cuda" : "cpu";
  config.threads = components.threads->Threads();
  ResolveCacheFormats(model, dtype, schemes, config);
  components.config = std::move(config);
  return components;
}

}  // namespace kvanta::engine
