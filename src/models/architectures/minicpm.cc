// MiniCPM 1, 2 and 4: Llama with factors of embeddings, of what blocks add and of output logits. Hugging Face:
// openbmb/MiniCPM-2B-sft-bf16, modeling_minicpm.py.
#include <cmath>

#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadMiniCpm(const JsonObject& json, ModelConfig& config) {
  // Sparse attention over blocks of long contexts (MiniCPM 4.1), and experts.
  if (json.Has("sparse_config")) json.Fail("sparse_config", "null: sparse attention is not supported");
  if (json.Int("num_experts", 0, 65536, 0) != 0) json.Fail("num_experts", "0: experts are not supported");
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.embedding_scale = json.Number("scale_emb", 1e-6, 1e6, 1);
  config.residual_scale = json.Number("scale_depth", 1e-6, 1e6, 1) / std::sqrt(static_cast<double>(config.layers));
  config.logits_divisor = config.hidden / json.Number("dim_model_base", 1e-6, 1e9, 1);
}

constexpr std::string_view kMiniCpmDefaults = R"({"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
  "tie_word_embeddings": true, "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kMiniCpm = {"MiniCPMForCausalLM", "minicpm", ReadMiniCpm, kMiniCpmDefaults};

}  // namespace kvanta::models
