#include "engine/cache_identity.h"

#include <nlohmann/json.hpp>

#include "attention/batch.h"
#include "attention/page_classes.h"
#include "formats/page_header.h"

namespace kvanta::engine {

std::string CacheIdentity(const EngineComponents& components) {
  formats::PageHeader pages;
  pages.model = components.model_identity;
  pages.layout = components.layout;
  if (components.layout.UsesScales()) pages.scales = components.scales;
  const EngineConfig& config = components.config;
  nlohmann::ordered_json identity = {{"numerics_version", kNumericsVersion},
                                     {"architecture", components.info.architecture},
                                     {"kv_cache_dtype", config.kv_cache_dtype},
                                     {"weights", components.weights_hash},
                                     {"dtype", config.dtype},
                                     {"weight_dtype", config.weight_dtype},
                                     {"device", config.device},
                                     {"isa", components.isa},
                                     {"pages", nlohmann::ordered_json::parse(PageHeaderToJson(pages))}};
  if (config.device == "cuda") identity["gpu_numerics_version"] = kGpuNumericsVersion;
  // The order of attention to latents on a CPU, on which the pages of later layers depend (docs/adr/0093).
  const std::vector<attention::AttentionSpec> layers = components.model->AttentionLayers();
  for (size_t i = 0; i < layers.size() && config.device == "cpu"; ++i) {
    if (!attention::DividesPages(components.layout.layers[i], layers[i])) continue;
    identity["latent_classes"] = attention::kLatentClasses;
    break;
  }
  return identity.dump();
}

}  // namespace kvanta::engine
