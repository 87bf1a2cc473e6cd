// Kimi Linear: three layers of Kimi Delta Attention, then one of latent attention without rope; experts after the first
// layer. transformers: models/kimi_linear/modeling_kimi_linear.py.
#include <fmt/format.h>

#include <algorithm>

#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

constexpr const char* kLinear =
    "linear_attn_config";  // the published file's object; transformers 5 writes keys of its own

// Layers of Kimi Delta Attention.
std::vector<bool> LinearLayers(const JsonObject& json, const ModelConfig& config) {
  constexpr const char* kKey = "full_attn_layers";
  std::vector<bool> layers(static_cast<size_t>(config.layers), true);
  if (!json.Has(kLinear) || !json.Object(kLinear).Has(kKey)) {
    for (size_t layer = 4; layer < layers.size(); layer += 4) layers[layer] = false;  // the class's default
    return layers;
  }
  const JsonObject linear = json.Object(kLinear);
  const Json& numbers = linear.Get(kKey);  // from 1 on
  const auto is_layer = [&](const Json& layer) {
    return layer.is_number_unsigned() && layer.get<uint64_t>() >= 1 && layer.get<uint64_t>() <= layers.size();
  };
  if (!numbers.is_array() || !std::ranges::all_of(numbers, is_layer)) {
    linear.Fail(kKey, fmt::format("a list of layers from 1 to {}", config.layers));
  }
  for (const Json& number : numbers) layers[number.get<size_t>() - 1] = false;
  return layers;
}

void ReadDeltaAttention(const JsonObject& json, ModelConfig& config) {
  constexpr KimiDeltaKeys kPublished{
      .heads = "num_heads", .head_dim = "head_dim", .conv_width = "short_conv_kernel_size"},
      kTransformers{.heads = "linear_num_heads", .head_dim = "linear_head_dim", .conv_width = "linear_conv_kernel_dim"};
  const bool nested = json.Has(kLinear);
  ReadKimiDeltaLayers(json, LinearLayers(json, config), nested ? json.Object(kLinear) : json,
                      nested ? kPublished : kTransformers, config);
}

void ReadKimiLinear(const JsonObject& json, ModelConfig& config) {
  if (!json.Bool("mla_use_nope", true)) json.Fail("mla_use_nope", "true: latent attention without rope");
  if (json.Int("moe_layer_freq", 1, 1, 1) != 1) json.Fail("moe_layer_freq", "1");
  config.max_position = ReadMaxPosition(json);
  ReadMla(json, config);
  config.mla.rope_interleave = false;
  for (LayerSpec& layer : config.layer_specs) layer.rope = {};
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 1), config);
  config.names.sparse_mlp = "block_sparse_moe";
  ReadDeltaAttention(json, config);
}

constexpr std::string_view kKimiLinearDefaults = R"({"vocab_size": 163840, "hidden_size": 2304,
  "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
  "head_dim": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576, "kv_lora_rank": 512,
  "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
  "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1,
  "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
  "bos_token_id": 163584, "eos_token_id": 163586})";

}  // namespace

void RenameKimiKeys(Json& keys) {
  constexpr const char* kNames[][2] = {{"num_experts", "n_routed_experts"},
                                       {"num_local_experts", "n_routed_experts"},
                                       {"num_experts_per_token", "num_experts_per_tok"},
                                       {"num_shared_experts", "n_shared_experts"},
                                       {"num_expert_group", "n_group"},
                                       {"moe_renormalize", "norm_topk_prob"},
                                       {"moe_router_activation_func", "scoring_func"},
                                       {"model_max_length", "max_position_embeddings"}};
  for (const auto& [from, to] : kNames) RenameKey(keys, from, to);
}

extern const Architecture kKimiLinear = {.name = "KimiLinearForCausalLM",
                                         .model_type = "kimi_linear",
                                         .read_config = ReadKimiLinear,
                                         .defaults = kKimiLinearDefaults,
                                         .reads_rope = true,
                                         .rename_keys = RenameKimiKeys};

}  // namespace kvanta::models
