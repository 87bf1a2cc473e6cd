#include "models/rope_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "kvanta/error.h"

namespace kvanta::models {
namespace {

constexpr double kMaxFactor = 1e6;

// Dynamic NTK scaling is the default rope up to the original length, and not supported beyond it (docs/adr/0021).
constexpr std::array kTypes = std::to_array<std::pair<std::string_view, RopeType>>({{"default", RopeType::kDefault},
                                                                                    {"linear", RopeType::kLinear},
                                                                                    {"dynamic", RopeType::kDefault},
                                                                                    {"llama3", RopeType::kLlama3},
                                                                                    {"yarn", RopeType::kYarn}});

RopeType ReadType(const JsonObject& rope) {
  // transformers 4 wrote "type" at first, then "rope_type".
  const std::string_view key = rope.Has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.String(key, "default");
  for (const auto& [name, value] : kTypes) {
    if (name == type) return value;
  }
  rope.Fail(key, "default, linear, dynamic, llama3 or yarn");
}

void ReadLlama3(const JsonObject& rope, RopeConfig& config) {
  config.low_freq_factor = rope.Number("low_freq_factor", 1e-6, kMaxFactor);
  config.high_freq_factor = rope.Number("high_freq_factor", 1e-6, kMaxFactor);
  if (config.high_freq_factor <= config.low_freq_factor) {
    rope.Fail("high_freq_factor", fmt::format("more than low_freq_factor ({})", config.low_freq_factor));
  }
}

void ReadYarn(const JsonObject& rope, RopeConfig& config) {
  // As in transformers, null and 0 mean the default.
  if (const double value = rope.Number("beta_fast", 0, kMaxFactor, 0); value != 0) config.beta_fast = value;
  if (const double value = rope.Number("beta_slow", 0, kMaxFactor, 0); value != 0) config.beta_slow = value;
  if (config.beta_fast < config.beta_slow) {
    rope.Fail("beta_fast", fmt::format("at least beta_slow ({})", config.beta_slow));
  }
  config.attention_factor = rope.Number("attention_factor", 1e-6, kMaxFactor, 0);
  config.mscale = rope.Number("mscale", 0, kMaxFactor, 0);
  config.mscale_all_dim = rope.Number("mscale_all_dim", 0, kMaxFactor, 0);
  config.truncate = rope.Bool("truncate", true);
}

void CheckWholeHeads(const JsonObject& object) {
  if (object.Number("partial_rotary_factor", 0, 1, 1) != 1) {
    object.Fail("partial_rotary_factor", "1 (the known architectures rotate whole heads)");
  }
}

// theta of the rope object if it has one, else of the top; both must agree.
double ReadTheta(const JsonObject& json, const JsonObject* rope) {
  constexpr double kDefault = 10000.0, kMin = 1.0 + 1e-6, kMax = 1e15;
  const double top = json.Number("rope_theta", kMin, kMax, kDefault);
  if (rope == nullptr || !rope->Has("rope_theta")) return top;
  const double theta = rope->Number("rope_theta", kMin, kMax);
  if (json.Has("rope_theta") && top != theta) {
    rope->Fail("rope_theta", fmt::format("the same as at the top of the file ({})", top));
  }
  return theta;
}

}  // namespace

RopeConfig ReadRopeConfig(const JsonObject& json, int64_t max_position) {
  CheckWholeHeads(json);
  RopeConfig config;
  config.original_max_position = max_position;
  const auto filled = [&](std::string_view key) { return json.Has(key) && !json.Object(key).Value().empty(); };
  if (filled("rope_scaling") && filled("rope_parameters") && json.Get("rope_scaling") != json.Get("rope_parameters")) {
    json.Fail("rope_scaling", "absent, or the same as rope_parameters");
  }
  const std::string_view key = filled("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!filled(key)) {
    config.theta = ReadTheta(json, nullptr);
    return config;
  }
  const JsonObject rope = json.Object(key);
  for (const auto& [name, value] : rope.Value().items()) {
    if (value.is_object()) rope.Fail(name, "no nested object (the known architectures use one rope in all layers)");
  }
  CheckWholeHeads(rope);
  config.theta = ReadTheta(json, &rope);
  config.type = ReadType(rope);
  if (config.type == RopeType::kDefault) return config;
  if (config.type == RopeType::kLlama3 || config.type == RopeType::kYarn) {
    constexpr const char* kOriginal = "original_max_position_embeddings";  // some files have it at the top
    config.original_max_position =
        rope.Int(kOriginal, 1, kMaxPositions, json.Int(kOriginal, 1, kMaxPositions, max_position));
  }
  if (config.type == RopeType::kYarn && rope.Value().contains("factor") && !rope.Has("factor")) {
    // transformers: an explicit null asks for the ratio of the lengths.
    config.factor = static_cast<double>(max_position) / static_cast<double>(config.original_max_position);
  } else {
    config.factor = rope.Number("factor", 1, kMaxFactor);
  }
  if (config.type == RopeType::kLlama3) ReadLlama3(rope, config);
  if (config.type == RopeType::kYarn) ReadYarn(rope, config);
  return config;
}

int64_t ScaledMaxPosition(const RopeConfig& rope, int64_t max_position) {
  const auto scaled = [&](int64_t length) {
    return std::min(kMaxPositions, static_cast<int64_t>(static_cast<double>(length) * rope.factor));
  };
  switch (rope.type) {
    case RopeType::kLinear:
      return std::max(max_position, scaled(max_position));
    case RopeType::kYarn:
      return std::max(max_position, scaled(rope.original_max_position));
    case RopeType::kDefault:
    case RopeType::kLlama3:
      break;
  }
  return max_position;
}

}  // namespace kvanta::models
