// InternLM2: Llama with q, k and v of each KV head in one matrix, under names of its own. Hugging Face:
// internlm/internlm2-chat-7b, modeling_internlm2.py (InternLM2Attention: "(h gs d)", where gs is q's heads, k and v).
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadInternLm2(const JsonObject& json, ModelConfig& config) {
  config.qkv_layout = QkvLayout::kByKvHead;
  config.qkv_bias = config.o_bias = json.Bool("bias", true);
  TensorNames& names = config.names;
  names.decoders = {{"model.", "output", "tok_embeddings"}};
  names.pre_attention_norm = "attention_norm";
  names.pre_mlp_norm = "ffn_norm";
  names.attention = "attention";
  names.qkv = "wqkv";
  names.attention_out = "wo";
  names.mlp = "feed_forward";
  names.gate = "w1";
  names.up = "w3";
  names.down = "w2";
}

constexpr std::string_view kInternLm2Defaults =
    R"({"vocab_size": 103168, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
  "eos_token_id": 2, "bos_token_id": 1})";

}  // namespace

extern const Architecture kInternLm2 = {"InternLM2ForCausalLM", "internlm2", ReadInternLm2, kInternLm2Defaults};

}  // namespace kvanta::models
