// ReadModelInfo and PlanCacheBytes: what an engine would be, without building one.
#include "engine/resolve.h"

namespace kvanta {

ModelInfo ReadModelInfo(const std::string& model, const std::string& dtype) {
  const models::ModelConfig config = models::ReadConfig(model);
  const DType store = engine::ResolveDType(dtype, config);
  ModelInfo info = engine::MakeModelInfo(config, store);
  info.weight_bytes = engine::WeightBytes(models::Checkpoint::Open(model), store);
  return info;
}

CachePlan PlanCacheBytes(const EngineConfig& config) {
  engine::CheckConfig(config);
  const models::ModelConfig model = models::ReadConfig(config.model);
  const DType dtype = engine::ResolveDType(config.dtype, model);
  engine::ResolveWeights(config, dtype);  // refuses what no engine would take
  const std::vector<KvScheme> schemes = engine::ResolveSchemes(config, model, dtype);
  const formats::CacheLayout layout = engine::PlanLayout(schemes, model, config.page_size);
  const cache::PageDemand demand(layout);
  CachePlan plan;
  plan.page_bytes = layout.page_bytes;
  plan.exact_page_bytes = layout.exact_page_bytes;
  plan.exact_pages_per_sequence = demand.exact_while_open ? 1 + demand.exact_behind + demand.sink_pages : 0;
  plan.bytes_per_token = static_cast<double>(layout.page_bytes) / layout.page_size;
  plan.bits_per_element = plan.bytes_per_token * 8 / (2.0 * model.layers * model.kv_heads * model.head_dim);
  return plan;
}

}  // namespace kvanta
