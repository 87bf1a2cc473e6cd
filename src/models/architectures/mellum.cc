// Mellum: Qwen3-MoE with windows and a rope by layer. transformers: models/mellum/modeling_mellum.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

// The predictor's layer, with a window and experts unless the file says otherwise: like the last one of that kind. None
// where the model has no such layer.
void ReadMellumPredictor(const JsonObject& json, ModelConfig& config) {
  if (json.Int("num_nextn_predict_layers", 0, 1, 0) == 0) return;
  const auto is_type = [&](const char* key, const char* type) {
    if (!json.Has(key)) return true;
    const Json& types = json.Get(key);
    if (!types.is_array() || types.size() != 1 || !types[0].is_string()) json.Fail(key, "a list of one type");
    return types[0] == type;
  };
  const bool has_window = is_type("mtp_layer_types", "sliding_attention"),
             moe = is_type("mtp_mlp_layer_types", "sparse");
  for (int i = 0; i < config.layers; ++i) {
    const LayerSpec& layer = config.layer_specs[static_cast<size_t>(i)];
    if (layer.visibility.IsFull() != has_window && layer.moe == moe) config.predictor_layer = i;
  }
  if (config.predictor_layer >= 0) config.names.predictor = kMtpPredictor;
}

void ReadMellum(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  ReadLayerTypes(json, static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0)), config);
  ReadRopesByLayerType(json, {.theta = 5e5}, {}, config);
  ReadMlpLayerTypes(json, 0, config);
  ReadExpertCounts(json, json.Has("num_local_experts") ? "num_local_experts" : "num_experts", "moe_intermediate_size",
                   config);
  config.moe.norm_topk_prob = json.Bool("norm_topk_prob", true);
  ReadMellumPredictor(json, config);
}

constexpr std::string_view kMellumDefaults = R"({"vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168,
  "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
  "max_position_embeddings": 131072, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896,
  "sliding_window": 1024})";

}  // namespace

extern const Architecture kMellum = {.name = "MellumForCausalLM",
                                     .model_type = "mellum",
                                     .read_config = ReadMellum,
                                     .defaults = kMellumDefaults,
                                     .reads_rope = true};

}  // namespace kvanta::models
