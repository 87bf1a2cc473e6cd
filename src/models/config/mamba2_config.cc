#include "models/config/mamba2_config.h"

#include <fmt/format.h>

#include <limits>

namespace kvanta::models {
namespace {

// Infinity is transformers' {"__float__": "Infinity"}.
float ReadLimit(const JsonObject& json, const char* key, const Json& value) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (value == "Infinity") return kInfinity;  // ParseConfigJson quotes Python's own
  if (value.is_object() && value.size() == 1 && value.contains("__float__") && value["__float__"] == "Infinity") {
    return kInfinity;
  }
  if (!value.is_number() || value.get<double>() < 0) json.Fail(key, "two numbers of at least 0, or Infinity");
  return static_cast<float>(value.get<double>());
}

void ReadTimeStepLimit(const JsonObject& json, kernels::Mamba2Shape& shape) {
  constexpr const char* kKey = "time_step_limit";
  const Json* limit = json.Find(kKey);
  if (limit == nullptr) return;
  if (!limit->is_array() || limit->size() != 2) json.Fail(kKey, "two numbers");
  shape.min_dt = ReadLimit(json, kKey, (*limit)[0]);
  shape.max_dt = ReadLimit(json, kKey, (*limit)[1]);
  if (shape.max_dt < shape.min_dt) json.Fail(kKey, "the smaller number first");
}

}  // namespace

void ReadMamba2(const JsonObject& json, const Mamba2Keys& keys, int64_t width, ModelConfig& config) {
  constexpr int kMaxHeads = 4096, kMaxHeadDim = 1024, kUnit = 8;
  if (config.mlp.activation != kernels::Activation::kSilu && config.mlp.kind != MlpKind::kUngated) {
    json.Fail("hidden_act", "silu, the activation of Mamba-2");
  }
  const auto channels = [&](std::string_view key, int max) {
    const auto count = static_cast<int>(json.Int(key, kUnit, max));
    if (count % kUnit != 0) json.Fail(key, fmt::format("a multiple of {} up to {}", kUnit, max));
    return count;
  };
  kernels::Mamba2Shape& shape = config.mamba2.shape;
  shape.heads = static_cast<int>(json.Int(keys.heads, 1, kMaxHeads));
  const Json* head_dim = json.Find(keys.head_dim);
  if (width != 0 && (head_dim == nullptr || *head_dim == "auto")) {
    if (width % shape.heads != 0 || width / shape.heads % kUnit != 0 || width / shape.heads > kMaxHeadDim) {
      json.Fail(keys.heads,
                fmt::format("heads of a multiple of {} up to {} channels, of {} together", kUnit, kMaxHeadDim, width));
    }
    shape.head_dim = static_cast<int>(width / shape.heads);
  } else {
    shape.head_dim = channels(keys.head_dim, kMaxHeadDim);
    if (width != 0 && shape.Width() != width) {
      json.Fail(keys.head_dim, fmt::format("{} / {} ({})", width, keys.heads, shape.heads));
    }
  }
  shape.groups = static_cast<int>(json.Int(keys.groups, 1, shape.heads));
  if (shape.heads % shape.groups != 0) {
    json.Fail(keys.groups, fmt::format("a divisor of {} ({})", keys.heads, shape.heads));
  }
  shape.state_size = channels(keys.state_size, kernels::kMaxMamba2StateSize);
  shape.conv_width = static_cast<int>(json.Int(keys.conv_width, 2, kernels::kMaxConvWidth));
  ReadTimeStepLimit(json, shape);
  config.mamba2.conv_bias = json.Bool(keys.conv_bias, true);
  config.mamba2.in_bias = config.mamba2.out_bias = json.Bool(keys.proj_bias, false);
}

void ReadExpandedMamba2(const JsonObject& json, ModelConfig& config) {
  ReadMamba2(json, {}, json.Int("mamba_expand", 1, 64, 2) * config.hidden, config);
}

}  // namespace kvanta::models
