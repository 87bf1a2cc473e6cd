// Llama 4, the language model: chunked attention in layers with rope, full attention without rope but with a
// temperature in the others; experts in some or all layers, where a row takes one in addition to the shared one.
// transformers: models/llama4/modeling_llama4.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// Chunks in the layers with rope, or as `layer_types` says.
void ReadChunks(const JsonObject& json, const std::vector<bool>& rope, ModelConfig& config) {
  constexpr const char* kKey = "layer_types";
  const auto chunk = static_cast<int32_t>(json.Int("attention_chunk_size", 1, int64_t{1} << 27));
  const cache::Visibility chunked{cache::VisibilityKind::kChunked, chunk};
  const Json types = json.Has(kKey) ? json.Get(kKey) : Json::array();
  const auto is_type = [](const Json& type) { return type == "chunked_attention" || type == "full_attention"; };
  const bool fits = types.is_array() && (types.empty() || types.size() == config.layer_specs.size());
  if (!fits || !std::ranges::all_of(types, is_type)) {
    json.Fail(kKey, fmt::format("'chunked_attention' or 'full_attention' for each of {} layers", config.layers));
  }
  for (size_t layer = 0; layer < config.layer_specs.size(); ++layer) {
    const bool is_chunked = types.empty() ? rope[layer] : types[layer] == "chunked_attention";
    if (is_chunked) config.layer_specs[layer].visibility = chunked;
  }
}

// Layers of experts: `moe_layers`, or every interleave_moe_layer_step-th one.
void ReadInterleavedExperts(const JsonObject& json, ModelConfig& config) {
  constexpr const char* kKey = "moe_layers";
  if (!json.Has(kKey)) {
    const int64_t step = json.Int("interleave_moe_layer_step", 1, int64_t{1} << 20, 1);
    for (int64_t layer = step - 1; layer < config.layers; layer += step) config.layer_specs[layer].moe = true;
    return;
  }
  const Json& layers = json.Get(kKey);
  const auto is_layer = [&](const Json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() < config.layer_specs.size();
  };
  if (!layers.is_array() || !std::ranges::all_of(layers, is_layer)) {
    json.Fail(kKey, fmt::format("a list of layers from 0 to {}", config.layers - 1));
  }
  for (const Json& layer : layers) config.layer_specs[layer.get<size_t>()].moe = true;
}

void ReadLlama4(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  const std::vector<bool> rope = ReadLayersWithRope(json, config.layers);
  const bool qk_norm = json.Bool("use_qk_norm", true);
  for (size_t layer = 0; layer < config.layer_specs.size(); ++layer) {
    LayerSpec& spec = config.layer_specs[layer];
    spec.rope.interleaved = true;
    spec.qk_l2_norm = qk_norm && rope[layer];
    if (!rope[layer]) spec.rope = RopeSpec{};
  }
  ReadChunks(json, rope, config);
  // The integer of older configs, 4, switches it on, too.
  const Json* tuning = json.Find("attn_temperature_tuning");
  const bool is_integer = tuning != nullptr && tuning->is_number_integer();
  if (is_integer ? *tuning != 0 : json.Bool("attn_temperature_tuning", true)) {
    config.attn_temperature = {.floor_scale = json.Int("floor_scale", 1, int64_t{1} << 40, 8192),
                               .attn_scale = json.Number("attn_scale", 0, 1e3, 0.1)};
  }
  ReadInterleavedExperts(json, config);
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  kernels::MoeConfig& moe = config.moe;
  moe.shared_expert_intermediate_size = moe.moe_intermediate_size;
  moe.scoring_func = kernels::ScoringFunc::kSigmoid;
  moe.apply_router_weight_on_input = true;
  config.intermediate_size = static_cast<int>(json.Int("intermediate_size_mlp", 1, kMaxExpertWidth));
  config.names.mlp = "feed_forward";
  config.names.router = "router";
  config.names.shared_expert = "shared_expert";
}

void ReadLlama4Multimodal(const JsonObject& json, ModelConfig& config) {
  ReadLlama4(json, config);
  config.names.decoders = {{"language_model.model.", "language_model.lm_head"}};
}

constexpr double kLlama4Theta = 500000;
constexpr std::string_view kLlama4Defaults = R"({"vocab_size": 202048, "hidden_size": 5120,
  "num_hidden_layers": 48, "num_attention_heads": 40, "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 16,
  "num_experts_per_tok": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "attention_chunk_size": 8192,
  "rms_norm_eps": 1e-5, "max_position_embeddings": 131072})";

}  // namespace

extern const Architecture kLlama4 = {.name = "Llama4ForCausalLM",
                                     .model_type = "llama4_text",
                                     .read_config = ReadLlama4,
                                     .defaults = kLlama4Defaults,
                                     .rope_theta = kLlama4Theta};
extern const Architecture kLlama4Multimodal = {.name = "Llama4ForConditionalGeneration",
                                               .model_type = "llama4",
                                               .read_config = ReadLlama4Multimodal,
                                               .rope_theta = kLlama4Theta,
                                               .text_config = "text_config",
                                               .text_model_type = "llama4_text"};

}  // namespace kvanta::models
