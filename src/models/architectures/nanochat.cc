// nanochat: RMS norms without weights, one of the embeddings too, and of q and k after a rope in the other direction;
// an MLP of squared ReLU without a gate; a softcap of the logits. transformers: models/nanochat/modeling_nanochat.py.
#include "models/architecture.h"

namespace kvanta::models {
namespace {

void ReadNanoChat(const JsonObject& json, ModelConfig& config) {
  config.qkv_bias = config.o_bias = json.Bool("attention_bias", false);
  config.norm_weights = false;
  config.norm_embeddings = true;
  for (LayerSpec& layer : config.layer_specs) {
    layer.rope.reversed = true;
    layer.qk_l2_norm = true;
  }
  config.final_logit_softcapping =
      json.Number("final_logit_softcapping", 1e-3, 1e6, json.Value().contains("final_logit_softcapping") ? 0 : 15);
  config.names.up = "fc1";
  config.names.down = "fc2";
}

constexpr std::string_view kNanoChatDefaults = R"({"vocab_size": 50304, "hidden_size": 768, "intermediate_size": 8192,
  "num_hidden_layers": 12, "num_attention_heads": 6, "hidden_act": "relu2", "max_position_embeddings": 2048,
  "eos_token_id": 1, "bos_token_id": 0})";

}  // namespace

extern const Architecture kNanoChat = {.name = "NanoChatForCausalLM",
                                       .model_type = "nanochat",
                                       .read_config = ReadNanoChat,
                                       .defaults = kNanoChatDefaults,
                                       .ungated_mlp = true};

}  // namespace kvanta::models
