// Gemma 4: norms around both blocks, GeGLU, norms of q, k and v. Layers with full attention have larger heads than
// those with a window, of which a quarter is rotated, and may use their keys as values. In the small models the last
// layers have no K and V of their own, and every layer has an input from a table of its own. transformers:
// models/gemma4/modeling_gemma4.py (the language model).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/attention/cpu/table.h"
#include "kvanta/error.h"
#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

constexpr int64_t kMaxWidth = int64_t{1} << 20;

constexpr int kHeadUnit = 8;

int ReadKvHeads(const JsonObject& json, std::string_view key, int heads, int missing) {
  const auto kv_heads = static_cast<int>(json.Int(key, 1, heads, missing));
  if (heads % kv_heads != 0) json.Fail(key, "a divisor of num_attention_heads");
  return kv_heads;
}

// Heads of single layers, as transformers writes them since 5.15: {"5": {"head_dim": 512, "num_key_value_heads": 4}}.
void ReadHeadsByLayer(const JsonObject& json, ModelConfig& config) {
  const JsonObject layers = json.Object("per_layer_config");
  for (const auto& [index, value] : layers.Value().items()) {
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    const bool is_index = !index.empty() && index.size() < 6 && std::ranges::all_of(index, is_digit);
    if (!is_index || std::stoi(index) >= config.layers) {
      layers.Fail(index, fmt::format("no layer but 0 to {}", config.layers - 1));
    }
    const JsonObject own = layers.Object(index);
    for (const auto& [key, setting] : value.items()) {
      if (key != "head_dim" && key != "num_key_value_heads") own.Fail(key, "head_dim and num_key_value_heads alone");
    }
    LayerSpec& layer = config.layer_specs[static_cast<size_t>(std::stoi(index))];
    layer.head_dim = static_cast<int>(own.Int("head_dim", kHeadUnit, kernels::kMaxHeadDim, config.head_dim));
    layer.kv_heads = ReadKvHeads(own, "num_key_value_heads", config.heads, config.kv_heads);
  }
}

void ReadHeadsOfFullAttention(const JsonObject& json, ModelConfig& config) {
  const bool k_eq_v = json.Bool("attention_k_eq_v", false);
  const bool by_layer = json.Has("per_layer_config");
  const auto head_dim =
      by_layer ? 0 : static_cast<int>(json.Int("global_head_dim", kHeadUnit, kernels::kMaxHeadDim, 512));
  // transformers: the key counts only where K and V are one.
  const int kv_heads =
      k_eq_v ? ReadKvHeads(json, "num_global_key_value_heads", config.heads, config.kv_heads) : config.kv_heads;
  for (LayerSpec& layer : config.layer_specs) {
    if (!layer.visibility.IsFull()) continue;
    layer.head_dim = head_dim;
    layer.kv_heads = by_layer ? 0 : kv_heads;
    layer.k_eq_v = k_eq_v;
  }
  if (by_layer) ReadHeadsByLayer(json, config);
  FillLayerSpecs(config);
  for (const LayerSpec& layer : config.layer_specs) {
    if (layer.head_dim % kHeadUnit != 0) {
      throw InputError(fmt::format("{}: heads of {} channels; supported are multiples of {} up to {}", json.File(),
                                   layer.head_dim, kHeadUnit, kernels::kMaxHeadDim));
    }
  }
}

// The last layers attend to K and V of the last layer before them with the same attention.
void ReadSharedLayers(const JsonObject& json, ModelConfig& config) {
  const auto shared = static_cast<int>(json.Int("num_kv_shared_layers", 0, config.layers - 1, 0));
  const auto own_end = config.layer_specs.end() - shared;
  const bool is_double = json.Bool("use_double_wide_mlp", false);
  for (auto layer = own_end; layer != config.layer_specs.end(); ++layer) {
    const auto is_alike = [&](const LayerSpec& each) { return each.visibility == layer->visibility; };
    const auto found = std::find_if(std::make_reverse_iterator(own_end), config.layer_specs.rend(), is_alike);
    if (found == config.layer_specs.rend()) {
      json.Fail("num_kv_shared_layers", "fewer, so that layers of both kinds have K and V of their own");
    }
    layer->kv_layer = static_cast<int>(config.layer_specs.rend() - found) - 1;
    if (is_double) layer->intermediate_size = 2 * config.intermediate_size;
  }
}

void ReadRopes(const JsonObject& json, ModelConfig& config) {
  config.max_position = ReadMaxPosition(json);
  for (LayerSpec& layer : config.layer_specs) {
    const bool is_full = layer.visibility.IsFull();
    layer.rope = ReadRopeOfLayers(json, is_full ? "full_attention" : "sliding_attention", layer.head_dim,
                                  config.max_position, is_full ? 1e6 : 1e4);
  }
}

void ReadPerLayerInputs(const JsonObject& json, ModelConfig& config) {
  config.hidden_size_per_layer_input = static_cast<int>(json.Int("hidden_size_per_layer_input", 0, kMaxWidth, 0));
  if (config.hidden_size_per_layer_input == 0) return;
  config.vocab_size_per_layer_input =
      static_cast<int>(json.Int("vocab_size_per_layer_input", config.vocab, kMaxWidth, config.vocab));
}

// Experts in all layers, in addition to the MLP.
void ReadExperts(const JsonObject& json, ModelConfig& config) {
  kernels::MoeConfig& moe = config.moe;
  moe.num_experts = static_cast<int>(json.Int("num_experts", 1, kMaxExperts));
  moe.num_experts_per_tok = static_cast<int>(json.Int("top_k_experts", 1, moe.num_experts));
  moe.moe_intermediate_size = static_cast<int>(json.Int("moe_intermediate_size", 1, kMaxExpertWidth));
  moe.norm_topk_prob = moe.has_expert_scales = true;
  config.mlp_beside_experts = true;
  config.names.pre_mlp_norm = "";  // the blocks have norms of their own
  config.names.expert_order = ExpertOrder::kOutIn;
  for (LayerSpec& layer : config.layer_specs) layer.moe = true;
}

void ReadGemma4(const JsonObject& json, ModelConfig& config) {
  config.names.post_attention_norm = "post_attention_layernorm";
  config.names.pre_mlp_norm = "pre_feedforward_layernorm";
  config.names.post_mlp_norm = "post_feedforward_layernorm";
  config.embedding_scale = std::sqrt(static_cast<double>(config.hidden));
  config.embedding_scale_rounded = true;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.qk_norm = QkNorm::kPerHead;
  config.v_norm = true;
  config.softmax_scale = 1;
  config.layer_scalars = true;
  config.final_logit_softcapping = json.Number("final_logit_softcapping", 1e-3, 1e6, 0);
  // "vision" changes the attention of images alone.
  constexpr const char* kBidirectional = "use_bidirectional_attention";
  if (json.String(kBidirectional, "vision") != "vision") json.Fail(kBidirectional, "null or \"vision\"");
  if (json.Bool("enable_moe_block", false)) ReadExperts(json, config);
  ReadAlternatingWindows(json, 6, config);
  config.layer_specs.back().visibility = {};  // as transformers, whatever layer_types says
  ReadHeadsOfFullAttention(json, config);
  ReadSharedLayers(json, config);
  ReadRopes(json, config);
  ReadPerLayerInputs(json, config);
}

// Text, images and sound: the language model alone, for prompts of text.
void ReadGemma4Multimodal(const JsonObject& json, ModelConfig& config) {
  ReadGemma4(json, config);
  config.names.decoders = {{"model.language_model.", "lm_head"}};
}

constexpr std::string_view kGemma4Defaults = R"({"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
  "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "tie_word_embeddings": true,
  "sliding_window": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
  "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}},
  "eos_token_id": 1, "bos_token_id": 2})";

// The unified model, whose images and sound have no towers of their own: without experts and per-layer embeddings.
constexpr std::string_view kGemma4UnifiedDefaults = R"({"vocab_size": 262144, "hidden_size": 2304,
  "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
  "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144,
  "tie_word_embeddings": true, "sliding_window": 1024, "rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}},
  "eos_token_id": 1, "bos_token_id": 2})";

}  // namespace

extern const Architecture kGemma4 = {.name = "Gemma4ForCausalLM",
                                     .model_type = "gemma4_text",
                                     .read_config = ReadGemma4,
                                     .defaults = kGemma4Defaults,
                                     .activation_key = "hidden_activation",
                                     .reads_rope = true};
extern const Architecture kGemma4Multimodal = {.name = "Gemma4ForConditionalGeneration",
                                               .model_type = "gemma4",
                                               .read_config = ReadGemma4Multimodal,
                                               .activation_key = "hidden_activation",
                                               .reads_rope = true,
                                               .text_config = "text_config",
                                               .text_model_type = "gemma4_text"};
extern const Architecture kGemma4Unified = {.name = "Gemma4UnifiedForCausalLM",
                                            .model_type = "gemma4_unified_text",
                                            .read_config = ReadGemma4,
                                            .defaults = kGemma4UnifiedDefaults,
                                            .activation_key = "hidden_activation",
                                            .reads_rope = true};
extern const Architecture kGemma4UnifiedMultimodal = {.name = "Gemma4UnifiedForConditionalGeneration",
                                                      .model_type = "gemma4_unified",
                                                      .read_config = ReadGemma4Multimodal,
                                                      .activation_key = "hidden_activation",
                                                      .reads_rope = true,
                                                      .text_config = "text_config",
                                                      .text_model_type = "gemma4_unified_text"};

}  // namespace kvanta::models
