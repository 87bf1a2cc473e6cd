// MiMo-V2-Flash: windows with sinks and twice the KV heads in most layers, full attention in the first and every sixth;
// heads rotated in part, whose values have fewer channels than their keys (the cache has zeros after them); experts by
// sigmoid scores after the first layer. transformers: models/mimo_v2_flash/modeling_mimo_v2_flash.py.
#include <fmt/format.h>

#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

void ReadMimoWindows(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kSize = "sliding_window_size";  // of published files: without the token itself
  constexpr int64_t kMax = int64_t{1} << 27;
  const auto window =
      static_cast<int>(json.Has(kSize) ? json.Int(kSize, 1, kMax) + 1 : json.Int("sliding_window", 1, kMax));
  if (!ReadLayerTypes(json, window, config)) {
    for (int layer = 1; layer < config.layers; ++layer) {
      if ((layer + 1) % 6 != 0)
        config.layer_specs[static_cast<size_t>(layer)].visibility = cache::SlidingWindow(window);
    }
  }
  if (config.heads % (2 * config.kv_heads) != 0) {
    json.Fail("num_key_value_heads", fmt::format("half a divisor of num_attention_heads ({})", config.heads));
  }
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.visibility.IsFull()) continue;
    layer.kv_heads = 2 * config.kv_heads;
    layer.attention_sinks = true;
  }
}

// rope_parameters by layer type, or the published keys.
void ReadMimoRopes(const JsonObject& json, ModelConfig& config) {
  constexpr double kTheta = 5e6, kWindowTheta = 1e4, kPartial = 0.334;
  config.max_position = ReadMaxPosition(json);
  const double partial = json.Number("partial_rotary_factor", 0.01, 1, kPartial);
  const auto read = [&](const char* type, const char* theta_key, double theta) {
    theta = ReadTheta(json, theta_key, theta);
    if (HasRopesByLayerType(json)) {
      return ReadRopeOfLayers(json, type, config.head_dim, config.max_position, theta, kPartial);
    }
    const Json none = Json::object();
    return ReadRopeParameters(JsonObject(none, json.File()), config.head_dim, config.max_position, theta, partial);
  };
  const RopeSpec full = read("full_attention", "rope_theta", kTheta);
  const RopeSpec window = read("sliding_attention", "swa_rope_theta", kWindowTheta);
  for (LayerSpec& layer : config.layer_specs) layer.rope = layer.visibility.IsFull() ? full : window;
}

// Keys of the published file that transformers does not read: what its class computes.
void CheckMimoKeys(const JsonObject& json, const ModelConfig& config) {
  const auto check_layers = [&](const char* key, auto flag_of, const char* expected) {
    Json layers = Json::array();
    for (const LayerSpec& layer : config.layer_specs) layers.push_back(flag_of(layer) ? 1 : 0);
    if (json.Has(key) && json.Get(key) != layers) json.Fail(key, expected);
  };
  check_layers(
      "hybrid_layer_pattern", [](const LayerSpec& layer) { return !layer.visibility.IsFull(); },
      "1 for the layers that layer_types says have a window, else 0");
  check_layers(
      "moe_layer_freq", [](const LayerSpec& layer) { return layer.moe; },
      "1 for the layers that mlp_layer_types says have experts, else 0");
  const auto check_size = [&](const char* key, int size) {
    if (json.Int(key, 1, int64_t{1} << 20, size) != size) json.Fail(key, fmt::format("{}", size));
  };
  check_size("swa_num_attention_heads", config.heads);
  check_size("swa_num_key_value_heads", 2 * config.kv_heads);
  check_size("swa_head_dim", config.head_dim);
  check_size("swa_v_head_dim", config.v_head_dim);
  if (!json.Bool("add_swa_attention_sink_bias", true)) json.Fail("add_swa_attention_sink_bias", "true");
  if (json.Bool("add_full_attention_sink_bias", false)) json.Fail("add_full_attention_sink_bias", "false");
}

void ReadMimo(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kValues = "v_head_dim";
  config.qkv_bias = json.Bool("attention_bias", false);
  config.v_head_dim = static_cast<int>(json.Int(kValues, 1, config.head_dim));
  config.value_scale = static_cast<float>(
      json.Number("attention_value_scale", 0, 1e3, json.Value().contains("attention_value_scale") ? 1 : 0.707));
  ReadMimoWindows(json, config);
  ReadMimoRopes(json, config);
  ReadMlpLayerTypes(json, 1, config);
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  if (config.moe.shared_expert_intermediate_size != 0) json.Fail("n_shared_experts", "none");
  config.names.sinks = "attention_sink_bias";
  CheckMimoKeys(json, config);
}

constexpr std::string_view kMimoDefaults = R"({"vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384,
  "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
  "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "moe_intermediate_size": 2048, "n_routed_experts": 256,
  "num_experts_per_tok": 8, "sliding_window": 129, "bos_token_id": 1})";

}  // namespace

extern const Architecture kMimoV2Flash = {.name = "MiMoV2FlashForCausalLM",
                                          .model_type = "mimo_v2_flash",
                                          .read_config = ReadMimo,
                                          .defaults = kMimoDefaults,
                                          .reads_rope = true};

}  // namespace kvanta::models
