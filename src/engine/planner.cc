// ReadModelInfo and PlanCacheBytes: properties of an engine, computed without building it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "base/math.h"
#include "engine/cache_stats.h"
#include "engine/engine_config.h"
#include "engine/proposers.h"
#include "engine/ranks.h"
#include "kvanta/error.h"
#include "models/fingerprint.h"
#include "models/kv_scales.h"
#include "models/weight_count.h"
#include "observe/kv_observer.h"

namespace kvanta {
namespace engine {
namespace {

// "fp8_e4m3 in 3 of 4 layers, nvfp4 in 1 of 4 layers"; "" if single layers declare nothing.
std::string DeclaredLayers(const models::ModelConfig& model) {
  std::map<std::string, int> counts;
  for (const std::string& scheme : model.declared_kv_cache_layers) {
    if (!scheme.empty()) ++counts[scheme];
  }
  std::vector<std::string> parts;
  for (const auto& [scheme, count] : counts) {
    parts.push_back(fmt::format("{} in {} of {} layers", scheme, count, model.layers));
  }
  return fmt::format("{}", fmt::join(parts, ", "));
}

}  // namespace

ModelInfo MakeModelInfo(const models::ModelConfig& model, DType dtype, const std::string& weight_dtype) {
  const models::WeightCount weights = models::CountWeights(model);
  ModelInfo info;
  info.architecture = model.architecture;
  info.dtype = std::string(Name(dtype));
  info.layers = model.KvLayers();
  info.hidden = model.hidden;
  info.heads = model.heads;
  info.kv_heads = model.kv_heads;
  info.head_dim = model.head_dim;
  info.rope_dim = model.mla.qk_rope_head_dim;
  info.vocab = model.vocab;
  info.max_position = model.max_position;
  info.sliding_window = model.SlidingWindows();
  info.sliding_window.resize(static_cast<size_t>(info.layers));
  for (const models::LayerSpec& layer : model.LayersWithKv()) {
    info.layer_heads.emplace_back(layer.kv_heads, layer.head_dim);
  }
  info.eos_token_ids = model.eos_token_ids;
  info.has_lm_head = model.has_lm_head;
  info.embedding_size = model.hidden;
  info.declared_kv_cache = model.declared_kv_cache.empty() ? DeclaredLayers(model) : model.declared_kv_cache;
  info.declared_kv_cache_error = model.declared_kv_cache_error;
  info.parameters = weights.Parameters();
  info.weight_bytes = weights.Bytes(ResolveWeights(weight_dtype, dtype), KeepsQuantized(weight_dtype, dtype));
  return info;
}

}  // namespace engine

ModelInfo ReadModelInfo(const std::string& model, const std::string& dtype, const std::string& weight_dtype) {
  const models::ModelConfig config = models::ReadConfig(model);
  const DType resolved = engine::ResolveDType(dtype, config);
  ModelInfo info = engine::MakeModelInfo(config, resolved, weight_dtype);
  if (weights::Checkpoint::IsGgufFolder(model)) {
    const weights::Checkpoint checkpoint = weights::Checkpoint::Open(model);
    if (engine::KeepsTypes(dtype, weight_dtype, checkpoint)) info.weight_bytes = checkpoint.TotalBytes();
  }
  return info;
}

CachePlan PlanCacheBytes(const EngineConfig& config) {
  engine::CheckConfig(config);
  const models::ModelConfig whole = models::ReadConfig(config.model);
  engine::CheckRanks(config, whole);
  const DType dtype = engine::ResolveDType(config.dtype, whole);
  engine::ResolveWeights(config.weight_dtype, dtype);  // throws as an engine would
  const std::vector<KvScheme> schemes = engine::ResolveSchemes(config, whole, dtype);
  const std::vector<formats::CacheLayout> layouts = engine::LayoutsOfRanks(config, whole, schemes);
  const auto largest = std::ranges::max_element(layouts, {}, &formats::CacheLayout::page_bytes);
  const formats::CacheLayout& layout = *largest;
  const models::ModelConfig model =
      engine::PartOfRank(config, whole, schemes, static_cast<int>(largest - layouts.begin())).model;
  const auto needs_matrices = [](const formats::LayerScheme& layer) { return layer.k.query; };
  if (config.quantization_param_path.empty() && std::ranges::any_of(layout.layers, needs_matrices)) {
    observe::CheckEqualHeads(model);  // the calibration would
  }
  const cache::KvCacheSpec spec(layout, engine::LayerVisibility(model), config.decode_context_parallel_size);
  if (config.max_model_len > model.max_position) {
    throw InputError(
        fmt::format("max_model_len = {}: the model's limit is {} tokens", config.max_model_len, model.max_position));
  }
  CachePlan plan;
  plan.kv_cache_dtype = engine::ResolveBaseScheme(config, model, dtype).ToString();
  plan.groups = engine::DescribeGroups(spec);
  for (const cache::KvCacheGroup& group : spec.groups) {
    if (!group.IsRecurrent()) plan.page_bytes += CeilDiv(group.page_bytes, int64_t{group.ranks});
  }
  plan.exact_page_bytes = layout.exact_page_bytes;
  for (const cache::KvCacheGroup& group : spec.groups) {
    if (!group.exact_while_open) continue;
    plan.exact_pages_per_sequence =
        std::max<int64_t>(plan.exact_pages_per_sequence, 1 + group.exact_before + group.sink_pages);
  }
  const int64_t tokens = config.max_model_len > 0 ? config.max_model_len : model.max_position;
  plan.bytes_per_token = spec.BytesPerToken(tokens);
  plan.floor_bytes_per_token = spec.FloorBytesPerToken();
  plan.sequence_bytes = spec.MaxBytes(tokens);
  if (const auto draft = engine::PlanSpeculation(config, whole)) {
    plan.draft_page_bytes = draft->layout.page_bytes;
    plan.draft_exact_bytes = draft->spec.MaxBytes(config.page_size) - draft->layout.page_bytes;
  }
  plan.draft_state_bytes = engine::MaxDraftRows(config) * model.StateInputBytes();
  double elements = 0;  // elements per token; latents are K and V as one, keys of indexers included
  for (const formats::LayerScheme& layer : layout.layers) {
    if (layer.IsRecurrent()) continue;
    const int of_row =
        layer.SharesCell() ? layer.shape.head_dim + layer.rope_dim : 2 * layer.kv_heads * layer.shape.head_dim;
    elements += static_cast<double>(of_row) / layer.row_tokens;
  }
  const cache::KvCacheSpec of_one_rank(layout, engine::LayerVisibility(model));
  plan.bits_per_element = of_one_rank.BytesPerToken(tokens) * 8 / elements;
  return plan;
}

std::string DecoderPrefix(const std::string& model) {
  return std::string(models::DecoderNames(models::ReadConfig(model), weights::Checkpoint::Open(model)).prefix);
}

MissingMatrices MissingQueryMatrices(const EngineConfig& config) {
  if (!config.quantization_param_path.empty()) return {};
  engine::CheckConfig(config);
  const models::ModelConfig model = models::ReadConfig(config.model);
  const std::vector<KvScheme> schemes =
      engine::ResolveSchemes(config, model, engine::ResolveDType(config.dtype, model));
  const formats::CacheLayout layout =
      engine::PlanLayout(schemes, model, config.page_size, engine::StateRoundingOf(config));
  if (std::ranges::none_of(layout.layers, [](const auto& layer) { return layer.k.query; })) return {};
  const weights::Checkpoint checkpoint = weights::Checkpoint::Open(config.model);
  const models::KvScales scales = models::LoadKvScales(
      "", checkpoint, model, {.layers = layout.layers, .measured = true});  // the engine checks the scales
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    if (!layout.layers[i].k.query || scales.layers[i].k.query != nullptr) continue;
    const bool eigen = std::ranges::any_of(
        layout.layers, [](const auto& layer) { return formats::IsAllocated(layer.k.format->code); });
    return {.fingerprint = models::Fingerprint(checkpoint), .eigen_channels = eigen};
  }
  return {};
}

}  // namespace kvanta
