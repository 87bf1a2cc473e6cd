#include "models/config/rope_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::models {
namespace {

constexpr double kMaxFactor = 1e6;

// Dynamic NTK scaling is the default rope up to the original length, and not supported beyond it (docs/adr/0021).
constexpr std::array kTypes =
    std::to_array<std::pair<std::string_view, RopeType>>({{"default", RopeType::kDefault},
                                                          {"mrope", RopeType::kDefault},  // the same in prompts of text
                                                          {"linear", RopeType::kLinear},
                                                          {"dynamic", RopeType::kDefault},
                                                          {"llama3", RopeType::kLlama3},
                                                          {"yarn", RopeType::kYarn},
                                                          {"longrope", RopeType::kLongRope},
                                                          {"su", RopeType::kLongRope},
                                                          {"proportional", RopeType::kProportional}});

RopeType ReadType(const JsonObject& rope) {
  // transformers 4 wrote "type" at first, then "rope_type".
  const std::string_view key = rope.Has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.String(key, "default");
  // The first Phi-3 had "su" and "yarn" for longrope, which alone has factors for long contexts.
  if (type == "yarn" && rope.Has("long_factor")) return RopeType::kLongRope;
  for (const auto& [name, value] : kTypes) {
    if (name == type) return value;
  }
  rope.Fail(key, "default, linear, dynamic, llama3, yarn, longrope or proportional");
}

void ReadLlama3(const JsonObject& rope, RopeSpec& config) {
  config.low_freq_factor = rope.Number("low_freq_factor", 1e-6, kMaxFactor);
  config.high_freq_factor = rope.Number("high_freq_factor", 1e-6, kMaxFactor);
  if (config.high_freq_factor < config.low_freq_factor) {
    rope.Fail("high_freq_factor", fmt::format("at least low_freq_factor ({})", config.low_freq_factor));
  }
}

void ReadYarn(const JsonObject& rope, RopeSpec& config) {
  // As in transformers, null and 0 mean the default.
  if (const double value = rope.Number("beta_fast", 0, kMaxFactor, 0); value != 0) config.beta_fast = value;
  if (const double value = rope.Number("beta_slow", 0, kMaxFactor, 0); value != 0) config.beta_slow = value;
  if (config.beta_fast < config.beta_slow) {
    rope.Fail("beta_fast", fmt::format("at least beta_slow ({})", config.beta_slow));
  }
  config.attention_factor = rope.Number("attention_factor", 1e-6, kMaxFactor, 0);
  config.mscale = rope.Number("mscale", 0, kMaxFactor, 0);
  config.mscale_all_dim = rope.Number("mscale_all_dim", 0, kMaxFactor, 0);
  config.truncate = rope.BoolOrNull("truncate", true);
}

std::vector<float> ReadFactors(const JsonObject& rope, std::string_view key, int rotary_dim) {
  const Json& values = rope.Get(key);
  const auto is_factor = [](const Json& value) {
    return value.is_number() && value.get<double>() >= 1e-3 && value.get<double>() <= kMaxFactor;
  };
  const bool is_list = values.is_array() && values.size() == static_cast<size_t>(rotary_dim / 2) &&
                       std::all_of(values.begin(), values.end(), is_factor);
  if (!is_list) rope.Fail(key, fmt::format("a list of {} numbers from 0.001 to {}", rotary_dim / 2, kMaxFactor));
  return values.get<std::vector<float>>();
}

constexpr const char* kOriginal = "original_max_position_embeddings";

// transformers: the key at the top of the file, where Phi has it, comes before the one in the object.
const JsonObject& OriginalSource(const JsonObject& rope, const JsonObject& json) {
  return json.Has(kOriginal) ? json : rope;
}

void ReadLongRope(const JsonObject& rope, const JsonObject& json, int64_t max_position, RopeSpec& config) {
  config.original_max_position =
      OriginalSource(rope, json).Int(kOriginal, 2, kMaxPositions, std::max<int64_t>(2, max_position));
  config.factor = rope.Number("factor", 1, kMaxFactor,
                              static_cast<double>(max_position) / static_cast<double>(config.original_max_position));
  config.attention_factor = rope.Number("attention_factor", 1e-6, kMaxFactor, 0);
  config.short_factor = ReadFactors(rope, "short_factor", config.rotary_dim);
  config.long_factor = ReadFactors(rope, "long_factor", config.rotary_dim);
}

int ReadRotaryDim(const JsonObject& object, int head_dim, int missing) {
  constexpr const char* kKey = "partial_rotary_factor";
  if (!object.Has(kKey)) return missing;
  const auto rotary_dim = static_cast<int>(head_dim * object.Number(kKey, 0, 1));
  if (rotary_dim < 2 || rotary_dim % 2 != 0) {
    object.Fail(kKey, fmt::format("one that gives an even number of the {} channels of a head", head_dim));
  }
  return rotary_dim;
}

// Heads are rotated whole, in which the upper pairs may have the frequency 0.
void ReadProportional(const JsonObject& rope, RopeSpec& config) {
  config.rotated_pairs = static_cast<int>(config.rotary_dim * rope.Number("partial_rotary_factor", 0, 1, 1) / 2);
  config.factor = rope.Number("factor", 1, kMaxFactor, 1);
}

void CheckWholeHeads(const JsonObject& object) {
  if (object.Number("partial_rotary_factor", 0, 1, 1) != 1) {
    object.Fail("partial_rotary_factor", "1: heads are rotated whole");
  }
}

bool IsFilled(const JsonObject& json, std::string_view key) {
  return json.Has(key) && !json.Object(key).Value().empty();
}

void CheckOneGeneration(const JsonObject& json) {
  if (IsFilled(json, "rope_scaling") && IsFilled(json, "rope_parameters") &&
      json.Get("rope_scaling") != json.Get("rope_parameters")) {
    json.Fail("rope_scaling", "absent, or the same as rope_parameters");
  }
}

// Reads the scaling in `rope`. `json` may hold original_max_position_embeddings as well.
void ReadScaling(const JsonObject& rope, const JsonObject& json, int64_t max_position, RopeSpec& config) {
  config.type = ReadType(rope);
  if (config.type == RopeType::kDefault) return;
  if (config.type == RopeType::kLongRope) return ReadLongRope(rope, json, max_position, config);
  if (config.type == RopeType::kProportional) return ReadProportional(rope, config);
  if (config.type == RopeType::kLlama3 || config.type == RopeType::kYarn) {
    config.original_max_position = OriginalSource(rope, json).Int(kOriginal, 1, kMaxPositions, max_position);
  }
  if (config.type == RopeType::kYarn && rope.Value().contains("factor") && !rope.Has("factor")) {
    // transformers: an explicit null asks for the ratio of the lengths.
    config.factor = static_cast<double>(max_position) / static_cast<double>(config.original_max_position);
  } else {
    config.factor = rope.Number("factor", 1, kMaxFactor);
  }
  if (config.type == RopeType::kLlama3) ReadLlama3(rope, config);
  if (config.type == RopeType::kYarn) ReadYarn(rope, config);
}

}  // namespace

int64_t ReadMaxPosition(const JsonObject& json) {
  // vLLM takes 2048 where a class has no default.
  return std::min(kMaxPositions, json.Int("max_position_embeddings", 1, int64_t{1} << 40, 2048));
}

double ReadTheta(const JsonObject& json, std::string_view key, double missing) {
  return json.Number(key, 1.0 + 1e-6, 1e15, missing);
}

RopeSpec ReadRopeParameters(const JsonObject& rope, int head_dim, int64_t max_position, double theta, double partial) {
  if (ReadType(rope) != RopeType::kProportional && partial == 0) CheckWholeHeads(rope);
  const int rotated = partial == 0 ? head_dim : ReadRotaryDim(rope, head_dim, static_cast<int>(head_dim * partial));
  RopeSpec config{
      .rotary_dim = rotated, .theta = ReadTheta(rope, "rope_theta", theta), .original_max_position = max_position};
  ReadScaling(rope, rope, max_position, config);
  return config;
}

bool HasRopesByLayerType(const JsonObject& json) {
  if (!json.Has("rope_parameters")) return false;
  const JsonObject ropes = json.Object("rope_parameters");
  return ropes.Has("full_attention") || ropes.Has("sliding_attention");
}

RopeSpec ReadRopeOfLayers(const JsonObject& json, std::string_view type, int head_dim, int64_t max_position,
                          double theta, double partial) {
  CheckOneGeneration(json);
  const Json none = Json::object();
  const JsonObject ropes = json.Has("rope_parameters") ? json.Object("rope_parameters") : JsonObject(none, json.File());
  return ReadRopeParameters(ropes.Has(type) ? ropes.Object(type) : JsonObject(none, json.File()), head_dim,
                            max_position, theta, partial);
}

void ReadRopesByLayerType(const JsonObject& json, const RopeDefault& full, const RopeDefault& sliding,
                          ModelConfig& config) {
  constexpr const char* kKey = "rope_parameters";
  config.max_position = ReadMaxPosition(json);  // scaling is included
  for (const char* other : {"rope_scaling", "rope_theta", "partial_rotary_factor"}) {
    if (json.Has(other)) json.Fail(other, fmt::format("absent: this class has {} by layer type", kKey));
  }
  for (LayerSpec& layer : config.layer_specs) {
    const char* type = layer.visibility.IsFull() ? "full_attention" : "sliding_attention";
    const RopeDefault& missing = layer.visibility.IsFull() ? full : sliding;
    if (json.Has(kKey) && !json.Object(kKey).Has(type)) json.Fail(kKey, fmt::format("an object with '{}'", type));
    layer.rope = ReadRopeOfLayers(json, type, config.head_dim, config.max_position, missing.theta,
                                  json.Has(kKey) ? 1 : missing.partial);
  }
}

RopeSpec ReadRopeSpec(const JsonObject& json, int head_dim, int64_t max_position, double theta, bool partial) {
  if (!partial) CheckWholeHeads(json);
  CheckOneGeneration(json);
  const double top_theta = ReadTheta(json, "rope_theta", theta);
  RopeSpec config{.rotary_dim = partial ? ReadRotaryDim(json, head_dim, head_dim) : head_dim,
                  .theta = top_theta,
                  .original_max_position = max_position};
  const std::string_view key = IsFilled(json, "rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!IsFilled(json, key)) return config;
  const JsonObject rope = json.Object(key);
  for (const auto& [name, value] : rope.Value().items()) {
    if (value.is_object()) rope.Fail(name, "no nested object (all layers of this architecture have one rope)");
  }
  if (partial && ReadType(rope) == RopeType::kProportional) {
    rope.Fail("rope_type", "another one: heads of this architecture are partly rotated");
  }
  if (!partial) CheckWholeHeads(rope);
  if (partial) config.rotary_dim = ReadRotaryDim(rope, head_dim, config.rotary_dim);
  config.theta = ReadTheta(rope, "rope_theta", top_theta);
  if (json.Has("rope_theta") && top_theta != config.theta) {
    rope.Fail("rope_theta", fmt::format("the same as at the top of the file ({})", top_theta));
  }
  ReadScaling(rope, json, max_position, config);
  return config;
}

void SetRope(const RopeSpec& rope, int64_t max_position, ModelConfig& config) {
  for (LayerSpec& layer : config.layer_specs) layer.rope = rope;
  config.max_position = max_position;
  if (rope.type != RopeType::kLinear && rope.type != RopeType::kYarn) return;
  const int64_t unscaled = rope.type == RopeType::kLinear ? max_position : rope.original_max_position;
  const auto scaled = static_cast<int64_t>(static_cast<double>(unscaled) * rope.factor);
  config.max_position = std::max(max_position, std::min(kMaxPositions, scaled));
}

}  // namespace kvanta::models
