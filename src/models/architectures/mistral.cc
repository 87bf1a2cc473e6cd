// Mistral: Llama with one sliding window in all layers. Ministral: windows by layer. Ministral 3: queries that grow
// with the position. transformers:
// models/mistral/modeling_mistral.py, models/ministral/modeling_ministral.py, models/ministral3/modeling_ministral3.py.
#include "models/architecture.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

int ReadWindow(const JsonObject& json) {
  return static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
}

void ReadWindowOfAllLayers(const JsonObject& json, ModelConfig& config) {
  const int window = ReadWindow(json);
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
  if (json.Has("layer_types")) {  // accepted where it says the same; transformers ignores it with a warning
    const Json& types = json.Get("layer_types");
    for (const Json& type : types) {
      if (type != (window != 0 ? "sliding_attention" : "full_attention")) {
        json.Fail("layer_types", "the same attention in all layers, as sliding_window says");
      }
    }
  }
}

void ReadMinistral(const JsonObject& json, ModelConfig& config) {
  const int window = ReadWindow(json);
  if (ReadLayerTypes(json, window, config)) return;
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
}

void ReadMinistral3(const JsonObject& json, ModelConfig& config) {
  ReadWindowOfAllLayers(json, config);
  ReadQueryScaling(json, config);
}

constexpr std::string_view kMistralDefaults = R"({"vocab_size": 32000, "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
  "max_position_embeddings": 131072, "sliding_window": 4096})";

constexpr std::string_view kMinistral3Defaults = R"({"vocab_size": 131072, "hidden_size": 4096,
  "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32, "num_key_value_heads": 8,
  "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5})";

constexpr std::string_view kMinistral3Rope = R"({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16,
  "original_max_position_embeddings": 16384, "mscale": 1, "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1})";

}  // namespace

void ReadQueryScaling(const JsonObject& json, ModelConfig& config) {
  const std::string_view key = json.Has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  if (!json.Has(key)) return;
  const JsonObject rope = json.Object(key);
  const double beta = rope.Number("llama_4_scaling_beta", 0, 1e3, 0);
  if (beta == 0) return;
  for (LayerSpec& layer : config.layer_specs) {
    layer.rope.llama_4_scaling_beta = beta;
    layer.rope.original_max_position =
        rope.Int("original_max_position_embeddings", 1, kMaxPositions, layer.rope.original_max_position);
  }
}

extern const Architecture kMistral = {"MistralForCausalLM", "mistral", ReadWindowOfAllLayers, kMistralDefaults};
extern const Architecture kMinistral = {"MinistralForCausalLM", "ministral", ReadMinistral, kMistralDefaults};
extern const Architecture kMinistral3 = {.name = "Ministral3ForCausalLM",
                                         .model_type = "ministral3",
                                         .read_config = ReadMinistral3,
                                         .defaults = kMinistral3Defaults,
                                         .default_rope = kMinistral3Rope};

}  // namespace kvanta::models
