// config.json of a Hugging Face folder, both generations (transformers 4 and 5), validated.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

namespace kvanta::models {

enum class RopeType : uint8_t { kDefault, kLinear, kDynamic, kLlama3, kYarn };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000.0;
  double factor = 1.0;
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  double attention_factor = 0.0;                         // yarn; 0: from factor, mscale and mscale_all_dim
  double mscale = 0.0, mscale_all_dim = 0.0;             // yarn
  bool truncate = true;                                  // yarn
  int64_t original_max_position = 0;                     // before scaling; never 0 once read

  bool operator==(const RopeConfig&) const = default;
};

// Attention over latents (MLA): K and V of a token are one latent, the same for all heads, from which each head's are
// made; a key has rotated channels beside it.
struct MlaConfig {
  int rank = 0;              // of the latents; 0: there are none
  int q_lora_rank = 0;       // queries go through a space of this many channels; 0: they do not
  int qk_nope_head_dim = 0;  // channels of a head's query and key that position does not rotate
  int rope_dim = 0;          // channels that it does
  int v_head_dim = 0;        // channels of a head's value
  bool interleaved = true;   // channels (2 i, 2 i + 1) are rotated as a pair; else (i, i + rope_dim / 2)

  bool operator==(const MlaConfig&) const = default;
};

// Layers whose MLP is a mixture of experts.
struct MoeConfig {
  int count = 0;                   // 0: there are none
  int chosen = 0;                  // of a row
  int shared = 0;                  // experts that every row passes, as one MLP of that many times `ffn`
  int intermediate_size = 0;       // of one expert
  int first_layer = 0;             // layers before it have a plain MLP
  int groups = 1, topk_group = 1;  // experts are chosen from the best groups alone
  bool sigmoid = false;            // scores are sigmoids, chosen after a correction is added (V3); else a softmax (V2)
  bool normalized = false;         // weights are shares of the chosen scores' sum
  double scale = 1.0;              // of the weights

  bool In(int layer) const noexcept { return count != 0 && layer >= first_layer; }
  bool operator==(const MoeConfig&) const = default;
};

struct ModelConfig {
  std::string architecture;    // e.g. "LlamaForCausalLM"
  std::string model_type;      // e.g. "llama"
  DType dtype = DType::kBf16;  // of the checkpoint
  bool dtype_known = true;     // false: config.json does not say it, and no weights lie beside it
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate_size = 0, vocab = 0;
  // Of latents: kv_heads is 1 and head_dim their rank, as the cache has them.
  MlaConfig latent;
  MoeConfig experts;
  int rotary_dim = 0;                // head_dim, or latent.rope_dim
  int num_nextn_predict_layers = 0;  // of the checkpoint, behind the model's: they predict further tokens (MTP)
  double rms_eps = 1e-6;
  bool tied_embeddings = false;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;             // RMS norm of each head's q and k before RoPE (Qwen3)
  std::vector<int> sliding_window;  // per layer; 0: none
  int64_t max_position = 0;         // longest context; with linear, dynamic and yarn rope: after scaling
  RopeConfig rope;
  std::vector<int32_t> eos_token_ids;  // of config.json and generation_config.json
  int32_t bos_token_id = -1;
  std::string declared_kv_cache;  // scheme text declared by quantization_config.kv_cache_scheme or
                                  // hf_quant_config.json: "fp8_e4m3", "nvfp4"; "" when none

  // What logits are multiplied with.
  double SoftmaxScale() const;
};

// Reads config.json of a folder and, where they exist, generation_config.json and hf_quant_config.json. Weights are not
// needed. `path` may also be the config itself: a JSON file of any name, which is read alone unless it is config.json.
// Throws InputError naming the file, the key, the value and the alternatives.
ModelConfig ReadConfig(const std::string& path);

// The text of config.json alone. `dtype_missing` is set when it does not say how the weights are stored.
ModelConfig ParseConfig(std::string_view text, const std::string& name, bool* dtype_missing = nullptr);

// Adds the eos ids of the text of generation_config.json.
void AddGenerationConfig(std::string_view text, const std::string& name, ModelConfig& config);

// Adds the declaration in the text of hf_quant_config.json (ModelOpt); refuses quantized weights.
void AddHfQuantConfig(std::string_view text, const std::string& name, ModelConfig& config);

}  // namespace kvanta::models
