// Mistral Small 4: DeepSeek's latent attention with queries that grow with the position; experts chosen by a softmax,
// with shared ones, after the first dense layers. transformers: models/mistral4/modeling_mistral4.py.
#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

constexpr const char* kMistral4Experts = "n_routed_experts";

void ReadMistral4(const JsonObject& json, ModelConfig& config) {
  ReadMla(json, config);
  config.mla.rope_interleave = json.BoolOrNull("rope_interleave", true);
  ReadQueryScaling(json, config);
  MarkSparseLayers(json.Int("first_k_dense_replace", 0, config.layers, 0), config);
  kernels::MoeConfig& moe = config.moe;
  ReadExpertCounts(json, kMistral4Experts, "moe_intermediate_size", config);
  // Groups by the sum of their two best scores, as no other softmax has them; every published model has one.
  if (json.Int("n_group", 1, kMaxExperts, 1) != 1) json.Fail("n_group", "1");
  moe.shared_expert_intermediate_size =
      static_cast<int>(json.Int("n_shared_experts", 0, kMaxExperts, 0)) * moe.moe_intermediate_size;
  moe.norm_topk_prob = json.BoolOrNull("norm_topk_prob", true);
  moe.routed_scaling_factor = static_cast<float>(json.Number("routed_scaling_factor", 0, 1e6, 1.0));
  config.names.expert_order = ExpertOrder::kOutIn;
}

// Heads have no one size; this one only replaces hidden_size / num_attention_heads.
constexpr std::string_view kMistral4Defaults = R"({"vocab_size": 131072, "hidden_size": 4096,
  "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32,
  "num_key_value_heads": 32, "head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 4,
  "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64,
  "max_position_embeddings": 1048576, "eos_token_id": 2, "bos_token_id": 1})";

constexpr std::string_view kMistral4Rope = R"({"rope_type": "yarn", "rope_theta": 1e4, "factor": 128,
  "original_max_position_embeddings": 8192, "mscale": 1, "mscale_all_dim": 1, "llama_4_scaling_beta": 0.1})";

}  // namespace

extern const Architecture kMistral4 = {.name = "Mistral4ForCausalLM",
                                       .model_type = "mistral4",
                                       .read_config = ReadMistral4,
                                       .defaults = kMistral4Defaults,
                                       .partial_rotary = true,
                                       .default_rope = kMistral4Rope};

}  // namespace kvanta::models
