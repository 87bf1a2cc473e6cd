// OLMo: LayerNorm without weights. OLMo 2 and 3: norms after the blocks in place of before, and norms of q and k over
// all heads together. OLMo 3 has windows in three of four layers, and scales the rope of the others alone.
// transformers: models/olmo/modeling_olmo.py, models/olmo2/modeling_olmo2.py, models/olmo3/modeling_olmo3.py.
#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

// OLMo 1: Llama with LayerNorm without weights.
void ReadOlmo(const JsonObject& json, ModelConfig& config) {
  if (json.Has("clip_qkv")) json.Fail("clip_qkv", "null: q, k and v are not clipped");
  config.norm = NormKind::kLayer;
  config.norm_weights = false;
  config.rms_eps = 1e-5;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
}

void ReadOlmo2(const JsonObject& json, ModelConfig& config) {
  config.names.pre_attention_norm = config.names.pre_mlp_norm = "";
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  config.qk_norm = QkNorm::kAllHeads;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
}

// Ropes of both generations: rope_parameters by layer type; or rope_theta of all layers and rope_scaling of those with
// full attention.
void ReadOlmo3Ropes(const JsonObject& json, ModelConfig& config) {
  constexpr double kTheta = 5e5;
  config.max_position = ReadMaxPosition(json);  // scaling is included
  RopeSpec full, sliding;
  if (HasRopesByLayerType(json)) {
    const double theta = ReadTheta(json, "rope_theta", kTheta);
    full = ReadRopeOfLayers(json, "full_attention", config.head_dim, config.max_position, theta);
    sliding = ReadRopeOfLayers(json, "sliding_attention", config.head_dim, config.max_position, theta);
  } else {
    full = ReadRopeSpec(json, config.head_dim, config.max_position, kTheta);
    sliding = {.rotary_dim = config.head_dim, .theta = full.theta, .original_max_position = config.max_position};
  }
  for (LayerSpec& layer : config.layer_specs) layer.rope = layer.visibility.IsFull() ? full : sliding;
}

void ReadOlmo3(const JsonObject& json, ModelConfig& config) {
  constexpr int kPattern = 4;  // full attention in every fourth layer
  ReadOlmo2(json, config);
  ReadAlternatingWindows(json, kPattern, config);
  ReadOlmo3Ropes(json, config);
}

constexpr std::string_view kOlmoDefaults = R"({"max_position_embeddings": 2048, "eos_token_id": 50279})";
constexpr std::string_view kOlmo2Defaults =
    R"({"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279})";
constexpr std::string_view kOlmo3Defaults =
    R"({"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279, "sliding_window": 4096})";

}  // namespace

extern const Architecture kOlmo = {"OlmoForCausalLM", "olmo", ReadOlmo, kOlmoDefaults};
extern const Architecture kOlmo2 = {"Olmo2ForCausalLM", "olmo2", ReadOlmo2, kOlmo2Defaults};
extern const Architecture kOlmo3 = {.name = "Olmo3ForCausalLM",
                                    .model_type = "olmo3",
                                    .read_config = ReadOlmo3,
                                    .defaults = kOlmo3Defaults,
                                    .reads_rope = true};

}  // namespace kvanta::models
