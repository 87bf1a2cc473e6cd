// An architecture: what its config.json may say, and how it maps to the blocks of a decoder (decoder.h). Each has a
// file of its own and a line in models.cc.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

struct Architecture {
  std::string_view name;        // in config.json's "architectures"
  std::string_view model_type;  // in config.json's "model_type" and in scale files
  // Reads the keys that not all architectures have. The common ones are in `config` already.
  void (*read_config)(const JsonObject& json, ModelConfig& config);
  // Defaults of the Hugging Face class for keys that config.json may omit, as a JSON object.
  std::string_view defaults = "{}";
  std::string_view activation_key = "hidden_act";
  double rope_theta = 10000.0;  // the class's default
  bool partial_rotary = false;  // takes partial_rotary_factor; else heads are rotated whole
  // read_config reads the layers' ropes and max_position (layers of different kinds have different ropes).
  bool reads_rope = false;
  std::string_view other_name = "";  // other names of the same class in published files, with spaces between; "": none
  // Another model_type of the same architecture; "": none.
  std::string_view other_model_type = "";
  // Key of the object that holds the language model's config; "": the keys are at the top of the file.
  std::string_view text_config = "";
  // Its model_type where that object does not say it. The class of that type has its own defaults.
  std::string_view text_model_type = "";
  // The language model is another class, the one of text_config's model_type, which reads its keys, activation and
  // rope. read_config then says where its tensors are.
  bool has_text_class = false;
  // Defaults in addition, for keys that a text_config of this class may omit, as a JSON object.
  std::string_view text_defaults = "{}";
  // Key of an object with all keys of the file but model_type and architectures, in files that have it; "": none.
  std::string_view outer_config = "";
  // rope_parameters where the file has no scaled rope, as a JSON object; "": the default rope.
  std::string_view default_rope = "";
  // The first checkpoints have the keys of text_config at the top of the file.
  bool text_config_optional = false;
  // read_config reads the activation.
  bool reads_activation = false;
  // "gelu" is gelu_pytorch_tanh.
  bool gelu_is_tanh = false;
  bool ungated_mlp = false;  // the MLP has no gate (MlpKind::kUngated)
  // Gives keys that the class has under names of its own the common ones, where the file has these.
  void (*rename_keys)(Json& keys) = nullptr;
};

// The one list of architectures.
std::span<const Architecture* const> Architectures();

// By one of its names, or that of the class without an output matrix, which embedding models have ("Qwen3Model"). Null:
// unknown.
const Architecture* FindArchitecture(std::string_view name);

// Gives key `to`, if it is not there, the value of key `from`.
void RenameKey(Json& keys, const char* from, const char* to);

// Sets `intermediate_size` to four times `hidden_size` where the file has none.
void SetFourfoldMlp(Json& keys);

// Gives GPT-2's keys the common names.
void RenameGpt2Keys(Json& keys);

// Gives keys of Kimi Linear and of classes with the same names those of DeepSeek's.
void RenameKimiKeys(Json& keys);

// Removes keys of KV heads and of the heads' size, which a class of as many KV heads as heads does not read.
void RemoveHeadKeys(Json& keys);

// Sets the layers' visibility from `layer_types`: "full_attention", or "sliding_attention" with `window` tokens (0: an
// error). False without the key.
bool ReadLayerTypes(const JsonObject& json, int window, ModelConfig& config);

// Likewise, from `layer_types` and `sliding_window`; without the former, full attention in every `pattern`-th layer and
// the window in the others.
void ReadAlternatingWindows(const JsonObject& json, int pattern, ModelConfig& config);

// Recurrent layers of a kind.
struct RecurrentLayers {
  RecurrentKind kind = RecurrentKind::kNone;
  std::string_view name;     // in `layer_types`
  std::vector<bool> layers;  // where the file has no layer_types: true for recurrent ones
};

// Sets recurrent layers from `layer_types`, whose other entries are "full_attention".
void ReadRecurrentLayers(const JsonObject& json, const RecurrentLayers& recurrent, ModelConfig& config);

// Keys of the shape of Kimi Delta Attention.
struct KimiDeltaKeys {
  std::string_view heads, head_dim, conv_width;
};

// Sets layers of Kimi Delta Attention from `layer_types` ("linear_attention", "full_attention"), or from `layers`, and
// their shape from `keys` of `shape_keys`.
void ReadKimiDeltaLayers(const JsonObject& json, std::vector<bool> layers, const JsonObject& shape_keys,
                         const KimiDeltaKeys& keys, ModelConfig& config);

// Sets recurrent layers from `layer_types` ("linear_attention", "full_attention") or `full_attention_interval`, and
// their shape from the linear_* keys (Qwen3-Next and Qwen3.5).
void ReadGatedDeltaNetLayers(const JsonObject& json, ModelConfig& config);

// True for each of `layers` layers with rope: the ones of `no_rope_layers`, despite its name, which may have more
// entries; without entries, all but every no_rope_layer_interval-th layer.
std::vector<bool> ReadLayersWithRope(const JsonObject& json, int layers);

// Factors of embeddings, attention logits, what blocks add, and output logits (Granite).
void ReadGraniteFactors(const JsonObject& json, ModelConfig& config);

// Layers with the selection of an earlier layer's indexer, from `indexer_types`, `index_topk_pattern` or
// `index_topk_freq` (GLM-5 and Mistral Large 4).
void ReadSharedIndexers(const JsonObject& json, ModelConfig& config);

// Queries that grow with the position, from llama_4_scaling_beta of the rope (Ministral 3 and Mistral 4).
void ReadQueryScaling(const JsonObject& json, ModelConfig& config);

// Granite 3's classes: dense, and with experts and a shared one.
void ReadGranite(const JsonObject& json, ModelConfig& config);
void ReadGraniteMoeShared(const JsonObject& json, ModelConfig& config);

// Keys that all of Cohere's classes have.
void ReadCohereBlocks(const JsonObject& json, ModelConfig& config);

// Granite's experts, in all layers.
void ReadGraniteExperts(const JsonObject& json, ModelConfig& config);

// Sizes of Qwen2's and Qwen3's classes, which are the same (Architecture::text_defaults).
inline constexpr std::string_view kQwenTextDefaults = R"({"vocab_size": 151936, "hidden_size": 4096,
  "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32})";

// Windows from `sliding_window`, `use_sliding_window` and `layer_types` or `max_window_layers` (Qwen2 and Qwen3).
void ReadQwenWindows(const JsonObject& json, ModelConfig& config);

}  // namespace kvanta::models
