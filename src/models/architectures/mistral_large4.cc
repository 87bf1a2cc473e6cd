// Mistral Large 4: latent attention to the tokens that an indexer selects, with layers without rope, queries that grow
// with the logarithm of the position, and learned factors of the rope's frequencies; Mistral Small 4's experts. The
// language model alone. transformers: models/mistral_large4/modeling_mistral_large4.py.
#include <fmt/format.h>

#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

void CheckKvSources(const JsonObject& json, int layers) {
  constexpr const char* kKey = "kv_source_layers";
  if (!json.Has(kKey)) return;
  Json own = Json::array();
  for (int layer = 0; layer < layers; ++layer) own.push_back(layer);
  if (json.Get(kKey) != own) {
    json.Fail(kKey,
              fmt::format("each layer's own number, 0 to {}: latents of earlier layers are not read", layers - 1));
  }
}

void SetNames(TensorNames& names) {
  names.decoders = {{.prefix = "", .lm_head = "output", .embedding = "tok_embeddings"}};
  names.other_modules = {"vision_encoder", "vision_language_adapter", "patch_merger", "pre_mm_projector_norm",
                         "mtp_dspark"};
  names.rope_exponents = "lerope.alpha";
  names.pre_attention_norm = "attention_norm";
  names.pre_mlp_norm = "ffn_norm";
  names.attention = "attention";
  names.latent_q = "wq";
  names.kv_a = "wkv_a_with_mqa";
  names.kv_a_norm = "kv_a_norm";
  names.kv_b = "wkv_b";
  names.attention_out = "wo";
  names.query_scale = "ssmax_scaling.s";
  names.query_bias = "ssmax_scaling.b";
  names.mlp = "feed_forward";
  names.experts_in_layer = true;
  names.gate = "w1";
  names.up = "w3";
  names.down = "w2";
}

void ReadMistralLarge4(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mla.q_lora_rank = 0;
  config.mla.latent_eps = config.rms_eps;
  config.mla.log_query_scales = true;
  config.mla.keeps_rope_channels = false;
  const std::vector<bool> with_rope = ReadLayersWithRope(json, config.layers);
  for (size_t layer = 0; layer < with_rope.size(); ++layer) {
    if (!with_rope[layer]) config.layer_specs[layer].rope = {};
  }
  CheckKvSources(json, config.layers);
  config.indexer.norms_inputs = true;
  ReadIndexer(json, config);
  config.indexer.rope_interleave = true;
  ReadSharedIndexers(json, config);
  ReadExpertCounts(json, "n_routed_experts", "moe_intermediate_size", config);
  // Groups by the sum of their two best scores, as no other softmax has them; the published model has one.
  if (json.Int("n_group", 1, kMaxExperts, 1) != 1) json.Fail("n_group", "1");
  kernels::MoeConfig& moe = config.moe;
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("n_shared_experts", 0, kMaxExperts, 1)) * moe.moe_intermediate_size;
  moe.norm_topk_prob = true;
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.0));
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 1), config);
  config.final_logit_softcapping = json.Number("final_logit_softcapping", 1e-3, 1e6, 30);
  SetNames(config.names);
}

// Heads have no one size; this one only replaces hidden_size / num_attention_heads.
constexpr std::string_view kMistralLarge4Defaults = R"({"vocab_size": 204800, "hidden_size": 6144,
  "intermediate_size": 24576, "moe_intermediate_size": 6144, "num_hidden_layers": 72, "num_attention_heads": 64,
  "num_key_value_heads": 64, "head_dim": 64, "n_routed_experts": 128, "num_experts_per_tok": 4, "kv_lora_rank": 512,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64, "max_position_embeddings": 1048576,
  "rms_norm_eps": 1e-5, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "bos_token_id": 1,
  "eos_token_id": 2})";

constexpr std::string_view kMistralLarge4Rope = R"({"rope_type": "yarn", "rope_theta": 1e4, "factor": 2048,
  "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1})";

}  // namespace

extern const Architecture kMistralLarge4 = {.name = "MistralLarge4ForConditionalGeneration",
                                            .model_type = "mistral_large4",
                                            .read_config = ReadMistralLarge4,
                                            .defaults = kMistralLarge4Defaults,
                                            .text_config = "text_config",
                                            .text_model_type = "mistral_large4_text",
                                            .default_rope = kMistralLarge4Rope};

}  // namespace kvanta::models
