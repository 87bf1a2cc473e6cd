// Ling 3.0: five layers of Kimi Delta Attention with bounded decays, then one of latent attention with a gate of each
// head's output; experts after the first layers. transformers: models/bailing_hybrid/modeling_bailing_hybrid.py.
#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void ReadBoundedDelta(const JsonObject& json, ModelConfig& config) {
  const int64_t group = json.Int("layer_group_size", 1, 4096, 6);
  std::vector<bool> layers;
  for (int layer = 0; layer < config.layers; ++layer) layers.push_back((layer + 1) % group != 0);
  // transformers writes keys of its own, and another head_dim: that of rotated channels.
  const auto key = [&](const char* own, const char* published) { return json.Has(own) ? own : published; };
  ReadKimiDeltaLayers(json, layers, json,
                      {.heads = key("linear_num_heads", "num_attention_heads"),
                       .head_dim = key("linear_head_dim", "head_dim"),
                       .conv_width = key("linear_conv_kernel_dim", "short_conv_kernel_size")},
                      config);
  config.low_rank_gates = false;
  if (!json.Bool("kda_safe_gate", true)) return;
  constexpr const char* kBound = "kda_lower_bound";
  config.gated_delta_net.decay_lower_bound = static_cast<float>(json.Number(kBound, -1e6, 0, -5.0));
  if (config.gated_delta_net.decay_lower_bound == 0) json.Fail(kBound, "a number below 0");
}

void ReadBailingHybrid(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mla.q_lora_rank = 0;  // whatever the file says
  config.attn_output_gate = OutputGate::kPerHead;
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 2), config);
  ReadBoundedDelta(json, config);
  TensorNames& names = config.names;
  names.decoders = {{.embedding = "word_embeddings"}, {}};
  names.attention = "attention";
  names.attention_out = "dense";
  names.output_gate = "g_proj";
  names.correction_bias = "gate.expert_bias";
}

constexpr std::string_view kBailingHybridDefaults = R"({"vocab_size": 157184, "hidden_size": 2560,
  "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 42, "num_attention_heads": 32,
  "num_key_value_heads": 32, "head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
  "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 512,
  "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
  "short_conv_kernel_size": 4, "eos_token_id": 156895})";

}  // namespace

extern const Architecture kBailingHybrid = {.name = "BailingHybridForCausalLM",
                                            .model_type = "bailing_hybrid",
                                            .read_config = ReadBailingHybrid,
                                            .defaults = kBailingHybridDefaults,
                                            .rope_theta = 6e6,
                                            .rename_keys = RenameKimiKeys};

}  // namespace kvanta::models
