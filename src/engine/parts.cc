#include "engine/parts.h"

#include <fmt/format.h>

#include <cstdlib>

#include "attention/backends.h"
#include "attention/gpu_backend.h"
#include "base/device.h"
#include "base/quote.h"
#include "engine/resolve.h"
#include "kernels/cuda/gpu_ops.h"
#include "kvanta/error.h"
#include "models/fingerprint.h"
#include "models/kv_scales.h"

namespace kvanta::engine {
namespace {

std::string ChosenIsa(const std::string& isa) {
  if (isa != "auto") return isa;
  const char* forced = std::getenv("KVANTA_ISA");
  return forced != nullptr && *forced != '\0' ? forced : kernels::RunnableIsas().front();
}

// The GPU that device "cuda" means: `given`, or this machine's. Throws with what is missing.
std::shared_ptr<kernels::Gpu> FindGpu(const EngineConfig& config, std::shared_ptr<kernels::Gpu> given) {
  const auto refuse = [](std::string_view why) {
    throw InputError(fmt::format("device cuda: {}; there are: auto, cpu", why));
  };
  if (config.profile) refuse("a GPU's operations run behind the host's, which could not time them (profile)");
  if (config.isa != "auto") refuse(fmt::format("isa {} is of the CPU", Quote(config.isa)));
  if (given) return given;
  if (const std::string missing = kernels::MissingForCuda(); !missing.empty()) refuse(missing);
  return kernels::MakeCudaGpu();
}

}  // namespace

Parts LoadParts(EngineConfig config, std::shared_ptr<kernels::Gpu> gpu) {
  CheckConfig(config);
  const models::ModelConfig model = models::ReadConfig(config.model);
  const DType dtype = ResolveDType(config.dtype, model);
  const kernels::WeightType store = ResolveWeights(config.weight_dtype, dtype);
  const std::vector<KvScheme> schemes = ResolveSchemes(config, model, dtype);
  const int edges = ResolveBaseScheme(config, model, dtype).edge_layers;
  if (edges > 0 && config.on_warning) {
    config.on_warning(fmt::format("kv_cache_dtype = {}: the first and last {} layers stay in bf16; +edges=0 takes all",
                                  Quote(config.kv_cache_dtype), edges));
  }

  Parts parts;
  parts.layout = PlanLayout(schemes, model, config.page_size);
  const models::Checkpoint checkpoint = models::Checkpoint::Open(config.model);
  parts.model_identity = models::Fingerprint(checkpoint);
  parts.scales = models::UnitScales(model);
  if (parts.layout.UsesScales()) {
    models::KvScales found = models::LoadKvScales(config.quantization_param_path, checkpoint, model);
    parts.scales_given = found.source != models::ScaleSource::kNone;
    parts.scales = std::move(found.layers);
  } else if (!config.quantization_param_path.empty()) {
    // A file that the caller named is checked, or a typo in the format's name would drop it without a word.
    models::LoadKvScales(config.quantization_param_path, checkpoint, model);
    if (config.on_warning) {
      config.on_warning(fmt::format("quantization_param_path = {}: not used, no layer's format has static scales",
                                    Quote(config.quantization_param_path)));
    }
  }
  parts.threads = std::make_shared<ThreadPool>(config.threads);
  if (config.device == "cuda") {
    gpu = FindGpu(config, std::move(gpu));
    parts.ops = kernels::MakeGpuOps(gpu, parts.threads);
  } else {
    gpu = nullptr;
    parts.ops = kernels::MakeCpuOps(parts.threads, config.isa.c_str());
  }
  if (config.profile) {
    parts.profile = std::make_shared<StepProfile>();
    parts.ops = Profiled(std::move(parts.ops), parts.profile);
  }
  parts.isa = gpu ? gpu->Name() : ChosenIsa(config.isa);
  // The rope table is made for what the cache can hold at most; a model may claim any number of positions.
  cache::PageDemand demand(parts.layout, CommonWindow(model));
  demand.prefixes_stay = config.enable_prefix_caching;
  parts.positions = SizeCache(config, demand, model.max_position, parts.ops->device().AvailableBytes()).max_model_len;
  parts.model =
      models::Load(config.model, *parts.ops,
                   {.store = store, .max_rows = config.max_num_batched_tokens, .max_positions = parts.positions});
  if (gpu) {
    parts.make_backend = [gpu](cache::PageStore& pages, attention::BackendConfig setup) {
      return attention::MakeGpuBackend(pages, std::move(setup), gpu);
    };
  } else {
    const std::string backend = config.isa == "auto" ? "auto" : "cpu-" + config.isa;
    parts.make_backend = [threads = parts.threads, backend](cache::PageStore& pages, attention::BackendConfig setup) {
      return attention::MakeBackend(backend, pages, std::move(setup), threads);
    };
  }

  parts.info = MakeModelInfo(model, dtype, store);
  parts.info.weight_bytes = parts.model->WeightBytes();  // with what packing adds
  parts.info.hash = parts.model_identity;
  config.dtype = parts.info.dtype;
  if (store == kernels::WeightType::kBf16) config.weight_dtype = "bf16";
  config.device = gpu ? "cuda" : "cpu";
  config.threads = parts.threads->Threads();
  if (config.kv_cache_dtype == "auto") {
    config.kv_cache_dtype =
        model.declared_kv_cache.empty() ? std::string(UnquantizedScheme(dtype)) : model.declared_kv_cache;
  }
  parts.config = std::move(config);
  return parts;
}

}  // namespace kvanta::engine
