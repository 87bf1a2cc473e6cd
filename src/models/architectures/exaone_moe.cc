// K-EXAONE: windows with rope in three of four layers, full attention without rope in the others; DeepSeek V3's experts
// after the first dense layers. transformers: models/exaone_moe/modeling_exaone_moe.py.
#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadExaoneMoe(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kFlags = "is_moe_layer";
  config.qk_norm = QkNorm::kPerHead;
  // A pattern of letters is ignored: transformers accepts it only together with layer_types.
  const bool has_types = json.Has("layer_types");
  const auto pattern = has_types ? 1 : static_cast<int>(json.Int("sliding_window_pattern", 1, int64_t{1} << 20));
  ReadAlternatingWindows(json, pattern, config);
  for (LayerSpec& layer : config.layer_specs) {
    if (layer.visibility.IsFull()) layer.rope = RopeSpec{};
  }
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 1), config);
  if (json.Has(kFlags)) {  // published files have it; transformers does not read it
    Json layers = Json::array();
    for (const LayerSpec& layer : config.layer_specs) layers.push_back(layer.moe);
    if (json.Get(kFlags) != layers) json.Fail(kFlags, "the layers that mlp_layer_types or first_k_dense_replace say");
  }
  ReadSigmoidExperts(json, "num_experts", "num_shared_experts", config);
  config.names.correction_bias = "e_score_correction_bias";
}

constexpr std::string_view kExaoneMoeDefaults = R"({"num_key_value_heads": 32, "num_experts": 64,
  "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.5,
  "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048})";

}  // namespace

extern const Architecture kExaoneMoe = {.name = "ExaoneMoeForCausalLM",
                                        .model_type = "exaone_moe",
                                        .read_config = ReadExaoneMoe,
                                        .defaults = kExaoneMoeDefaults,
                                        .other_name = "ExaoneMoEForCausalLM"};

}  // namespace kvanta::models
