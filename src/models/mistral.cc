// Mistral: Llama with one sliding window in all layers. Ministral: windows by layer. Ministral 3: queries that grow
// with the position. Mistral 3 is text and vision, with one of these as its language model. transformers:
// models/mistral/modeling_mistral.py, models/ministral/modeling_ministral.py, models/ministral3/modeling_ministral3.py.
#include "models/architecture.h"
#include "models/rope_config.h"

namespace kvanta::models {
namespace {

int ReadWindow(const JsonObject& json) {
  return static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
}

// The class's defaults (8, 4096) are those of one model: required where the file is silent.
void CheckNotSilent(const JsonObject& json) {
  if (!json.Value().contains("num_key_value_heads")) json.Fail("num_key_value_heads", "an integer");
  if (!json.Value().contains("sliding_window")) json.Fail("sliding_window", "an integer, or null for none");
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

void ReadMistral(const JsonObject& json, ModelConfig& config) {
  CheckNotSilent(json);
  ReadWindowOfAllLayers(json, config);
}

void ReadMinistral(const JsonObject& json, ModelConfig& config) {
  CheckNotSilent(json);
  const int window = ReadWindow(json);
  if (ReadLayerTypes(json, window, config)) return;
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
}

void ReadMinistral3(const JsonObject& json, ModelConfig& config) {
  ReadWindowOfAllLayers(json, config);
  const std::string_view key = json.Has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const JsonObject rope = json.Object(key);
  const double beta = rope.Number("llama_4_scaling_beta", 0, 1e3, 0);
  if (beta == 0) return;
  for (LayerSpec& layer : config.layer_specs) {
    layer.rope.llama_4_scaling_beta = beta;
    layer.rope.original_max_position =
        rope.Int("original_max_position_embeddings", 1, kMaxPositions, layer.rope.original_max_position);
  }
}

void ReadMistral3(const JsonObject& json, ModelConfig& config) {
  const std::string text = json.String("model_type", "mistral");
  if (text == "mistral") {
    ReadMistral(json, config);
  } else if (text == "ministral") {
    ReadMinistral(json, config);
  } else if (text == "ministral3") {
    ReadMinistral3(json, config);
  } else {
    json.Fail("model_type", "mistral, ministral or ministral3");
  }
  config.names.decoders = {{"language_model.model.", "language_model.lm_head"}, {"model.language_model.", "lm_head"}};
}

}  // namespace

extern const Architecture kMistral = {"MistralForCausalLM", "mistral", ReadMistral};
extern const Architecture kMinistral = {"MinistralForCausalLM", "ministral", ReadMinistral};
extern const Architecture kMinistral3 = {"Ministral3ForCausalLM", "ministral3", ReadMinistral3,
                                         R"({"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5})"};
extern const Architecture kMistral3 = {.name = "Mistral3ForConditionalGeneration",
                                       .model_type = "mistral3",
                                       .read_config = ReadMistral3,
                                       .defaults = R"({"tie_word_embeddings": true})",
                                       .text_config = "text_config"};

}  // namespace kvanta::models
