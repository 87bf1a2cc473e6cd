// Configs of tests: made as JSON, changed by key, and parsed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "models/config/config.h"

namespace kvanta::models {

inline ModelConfig Parse(const nlohmann::json& config) {
  return ParseConfig(config.dump(), "config.json");
}

inline nlohmann::json With(nlohmann::json base, const std::string& key, const nlohmann::json& value) {
  base[key] = value;
  return base;
}

}  // namespace kvanta::models
