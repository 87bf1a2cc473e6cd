// Configs of tests: made as JSON, changed by key, and parsed.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "kvanta/error.h"
#include "models/config/config.h"

namespace kvanta::models {

inline ModelConfig Parse(const nlohmann::json& config) {
  return ParseConfig(config.dump(), "config.json");
}

inline nlohmann::json With(nlohmann::json base, const std::string& key, const nlohmann::json& value) {
  base[key] = value;
  return base;
}

// `message`: a part of the error's.
inline void ExpectRefused(const nlohmann::json& config, const char* message) {
  try {
    Parse(config);
    ADD_FAILURE() << "accepted, not refused with: " << message;
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr(message));
  }
}

}  // namespace kvanta::models
