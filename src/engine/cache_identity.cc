#include "engine/cache_identity.h"

#include <nlohmann/json.hpp>

#include "formats/page_header.h"

namespace kvanta::engine {

std::string CacheIdentity(const EngineComponents& components) {
  formats::PageHeader pages;
  pages.model = components.model_identity;
  pages.layout = components.layout;
  if (components.layout.UsesScales()) pages.scales = components.scales;
  const EngineConfig& config = components.config;
  const nlohmann::ordered_json identity = {{"numerics_version", kNumericsVersion},
                                           {"architecture", components.info.architecture},
                                           {"kv_cache_dtype", config.kv_cache_dtype},
                                           {"weights", components.weights_hash},
                                           {"dtype", config.dtype},
                                           {"weight_dtype", config.weight_dtype},
                                           {"device", config.device},
                                           {"isa", components.isa},
                                           {"pages", nlohmann::ordered_json::parse(PageHeaderToJson(pages))}};
  return identity.dump();
}

}  // namespace kvanta::engine
