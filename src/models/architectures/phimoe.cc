// Phi-3.5-MoE: Llama with LayerNorm and biases, and experts in all layers, of which SparseMixer chooses two.
// transformers: models/phimoe/modeling_phimoe.py, whose rope takes the short factors for contexts of all lengths;
// Microsoft's own code has the long ones beyond the original length, as here (docs/adr/0025).
#include "models/architecture.h"
#include "models/config/moe_config.h"
#include "models/config/rope_config.h"

namespace kvanta::models {
namespace {

// Factors of the rope, one for each of its two lists of frequencies.
void ReadMscales(const JsonObject& json, ModelConfig& config) {
  const std::string_view key = json.Has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const RopeType type = config.layer_specs.front().rope.type;
  if (type == RopeType::kDefault) return;
  if (type != RopeType::kLongRope) json.Fail(key, "a rope_type default or longrope");
  const JsonObject rope = json.Object(key);
  for (LayerSpec& layer : config.layer_specs) {
    layer.rope.short_mscale = rope.Number("short_mscale", 1e-6, 1e6);
    layer.rope.long_mscale = rope.Number("long_mscale", 1e-6, 1e6);
  }
}

void ReadPhimoe(const JsonObject& json, ModelConfig& config) {
  config.norm = NormKind::kLayerWithBias;
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.lm_head_bias = json.Bool("lm_head_bias", false);
  ReadMscales(json, config);
  const auto window = static_cast<int>(json.Int("sliding_window", 1, int64_t{1} << 27, 0));
  for (LayerSpec& layer : config.layer_specs) layer.visibility = cache::SlidingWindow(window);
  MarkSparseLayers(0, config);
  ReadExpertCounts(json, "num_local_experts", "intermediate_size", config);
  if (config.moe.num_experts_per_tok != 2) json.Fail("num_experts_per_tok", "2");
  config.moe.scoring_func = kernels::ScoringFunc::kSparseMixer;
  config.moe.router_jitter_noise = static_cast<float>(json.Number("router_jitter_noise", 0, 1, 0.01));
  config.names.mlp = "block_sparse_moe";
}

constexpr std::string_view kPhimoeDefaults = R"({"vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400,
  "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16,
  "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "eos_token_id": 2,
  "bos_token_id": 1})";

}  // namespace

extern const Architecture kPhimoe = {.name = "PhimoeForCausalLM",
                                     .model_type = "phimoe",
                                     .read_config = ReadPhimoe,
                                     .defaults = kPhimoeDefaults,
                                     .rope_theta = 1e6,
                                     .other_name = "PhiMoEForCausalLM"};

}  // namespace kvanta::models
