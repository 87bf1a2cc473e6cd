#include "engine/proposers.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/quote.h"
#include "engine/draft_model.h"
#include "engine/engine_config.h"
#include "engine/mtp_proposer.h"
#include "engine/ngram_proposer.h"
#include "engine/ranks.h"
#include "engine/spec_decode.h"
#include "kvanta/error.h"
#include "models/kv_scales.h"

namespace kvanta::engine {
namespace {

bool HasRecurrentLayers(const models::ModelConfig& model) {
  return std::ranges::any_of(model.layer_specs, &models::LayerSpec::IsRecurrent);
}

// Layers that give the sequences of a model their states.
std::string_view StatesOf(const models::ModelConfig& model) {
  return HasRecurrentLayers(model) ? "recurrent layers" : "compressed keys and values";
}

// The engine's options for the draft model: those that describe a model's weights or a cache's format are its own.
EngineConfig ConfigOfDraft(EngineConfig config, const SpeculativeConfig& speculation) {
  config.model = speculation.model;
  config.kv_cache_dtype = speculation.kv_cache_dtype;
  config.kv_cache_dtype_layers.clear();
  config.kv_cache_dtype_skip_layers.clear();
  config.quantization_param_path.clear();
  return config;
}

// Its model's config. Throws InputError.
models::ModelConfig ReadDraftModel(const EngineConfig& own, const EngineConfig& config,
                                   const models::ModelConfig& target) {
  models::ModelConfig model = models::ReadConfig(own.model);
  if (model.HasStates()) {
    throw InputError(fmt::format(
        "speculative_config: the draft model {} has {} ({}), which is not supported; choose a model of attention alone",
        Quote(own.model), StatesOf(model), model.architecture));
  }
  if (model.vocab != target.vocab) {
    throw InputError(
        fmt::format("speculative_config: the draft model {} has a vocabulary of {} tokens, the model {} one "
                    "of {}; they must be equal",
                    Quote(own.model), model.vocab, Quote(config.model), target.vocab));
  }
  return model;
}

models::ModelConfig PredictorOf(const EngineConfig& config, const models::ModelConfig& target) {
  if (!target.names.predictor) {
    throw InputError(fmt::format(
        "speculative_config: method mtp: {} has no layers that predict tokens (num_nextn_predict_layers), or "
        "they are not supported; there are: ngram, draft_model",
        target.architecture));
  }
  if (config.device == "cuda") {
    throw InputError("speculative_config: method mtp is not supported on device cuda; there are: ngram, draft_model");
  }
  models::ModelConfig model = models::ConfigOfPredictor(target);
  if (weights::Checkpoint::Exists(config.model)) {
    const weights::Checkpoint checkpoint = weights::Checkpoint::Open(config.model);
    const std::string module = models::PredictorModule(model, models::DecoderNames(target, checkpoint));
    const std::string norm = module + std::string(model.names.predictor.hidden_norm) + ".weight";
    if (checkpoint.Find(norm) == nullptr) {
      throw InputError(fmt::format(
          "speculative_config: method mtp: {} has no tensor {}: the checkpoint was saved without the layers "
          "that predict tokens; there are: ngram, draft_model",
          Quote(config.model), norm));
    }
  }
  return model;
}

}  // namespace

std::optional<DraftModelPlan> PlanSpeculation(const EngineConfig& config, const models::ModelConfig& target) {
  if (config.speculative_config.empty()) return {};
  if (target.HasStates() && RankCount(config) > 1) {
    throw InputError(fmt::format("speculative_config: not supported for {}, which has {}, with {} = {}; there is: 1",
                                 target.architecture, StatesOf(target), RankOption(config), RankCount(config)));
  }
  SpeculativeConfig speculation = ParseSpeculativeConfig(config.speculative_config);
  if (speculation.model.empty() && !speculation.mtp) return {};
  if (RankCount(config) > 1) {
    throw InputError(
        fmt::format("speculative_config: {0} with {1} = {2} is not supported; there are: method ngram, {1} = 1",
                    speculation.mtp ? "method mtp" : "a draft model", RankOption(config), RankCount(config)));
  }
  if (speculation.mtp) speculation.model = config.model;
  EngineConfig own = ConfigOfDraft(config, speculation);
  models::ModelConfig model = speculation.mtp ? PredictorOf(config, target) : ReadDraftModel(own, config, target);
  formats::CacheLayout layout =
      PlanLayout(ResolveSchemes(own, model, ResolveDType(own.dtype, model)), model, config.page_size, {});
  if (layout.UsesScales()) {
    const std::string declared = own.kv_cache_dtype == "auto" ? " of the draft model's checkpoint" : "";
    throw InputError(
        fmt::format("speculative_config: kv_cache_dtype {}{} needs scales, which are not read for a draft model; give "
                    "another kv_cache_dtype in speculative_config: int8, int4 and bf16 need none",
                    Quote(declared.empty() ? own.kv_cache_dtype : layout.layers.front().k.format->name), declared));
  }
  cache::KvCacheSpec spec(layout, LayerVisibility(model));
  if (spec.floors != 0) {
    throw InputError(fmt::format("speculative_config: kv_cache_dtype {}: the cache of a draft model has no floor",
                                 Quote(own.kv_cache_dtype)));
  }
  return DraftModelPlan{std::move(own), std::move(model), std::move(layout), std::move(spec)};
}

int64_t MaxDraftRows(const EngineConfig& config) {
  if (config.speculative_config.empty()) return 0;
  const int64_t tokens = ParseSpeculativeConfig(config.speculative_config).num_speculative_tokens;
  return std::min({kMaxStepRows - 1, int64_t{config.max_num_batched_tokens} - 1, tokens * config.max_num_seqs});
}

void AddProposer(const EngineConfig& config, std::optional<DraftModelPlan> plan, EngineComponents& components) {
  if (config.speculative_config.empty()) return;
  const SpeculativeConfig speculation = ParseSpeculativeConfig(config.speculative_config);
  components.num_speculative_tokens = speculation.num_speculative_tokens;
  if (!plan) {
    components.proposer = std::make_unique<NgramProposer>(speculation.prompt_lookup_min, speculation.prompt_lookup_max);
    return;
  }
  const EngineConfig& own = plan->config;
  const DType dtype = ResolveDType(own.dtype, plan->model);
  const int64_t positions = std::min<int64_t>(components.positions, plan->model.max_position);
  const models::LoadOptions options{
      .store = ResolveWeights(own.weight_dtype, dtype),
      .keep_types = KeepsTypes(own.dtype, own.weight_dtype, weights::Checkpoint::Open(own.model)),
      .keep_quantized = KeepsQuantized(own.weight_dtype, dtype),
      .max_rows = own.max_num_batched_tokens,
      .max_positions = positions};
  models::Model& target = *components.model;
  DraftModelSetup setup{.model = speculation.mtp ? models::LoadPredictor(own.model, target, options)
                                                 : models::Load(own.model, *components.ops, options),
                        .layout = std::move(plan->layout),
                        .visibility = LayerVisibility(plan->model),
                        .scales = {},
                        .make_backend = components.make_backend,
                        .threads = components.threads,
                        .positions = positions,
                        .max_rows = own.max_num_batched_tokens,
                        .max_logit_rows = MaxLogitRows(own),
                        .prefix_caching = own.enable_prefix_caching && !speculation.mtp,
                        .graphs = own.enforce_eager ? runner::Graphs::kNone : runner::Graphs::kIfMemory};
  if (speculation.mtp) {
    components.proposer = std::make_unique<MtpProposer>(std::move(setup));
  } else {
    components.proposer = std::make_unique<DraftModel>(std::move(setup));
  }
}

}  // namespace kvanta::engine
