// config.json of a Hugging Face folder, both generations (transformers 4 and 5), validated.
#pragma once

#include <cstdint>
#include <string>
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
  double attention_factor = 0.0;                         // yarn; 0: 0.1 ln(factor) + 1
  double mscale = 0.0, mscale_all_dim = 0.0;             // yarn
  bool truncate = true;                                  // yarn
  int64_t original_max_position = 0;                     // 0: max_position
};

struct ModelConfig {
  std::string architecture;    // e.g. "LlamaForCausalLM"
  DType dtype = DType::kBf16;  // of the checkpoint
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
  int rotary_dim = 0;  // head_dim unless partial_rotary_factor says less
  double rms_eps = 1e-5;
  bool tied_embeddings = false;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;             // RMS norm of each head's q and k before RoPE (Qwen3)
  std::vector<int> sliding_window;  // per layer; 0: none
  int64_t max_position = 0;
  RopeConfig rope;
  std::vector<int32_t> eos_token_ids;  // config.json and generation_config.json
  int32_t bos_token_id = -1;
  std::string declared_kv_cache;  // scheme text declared by quantization_config.kv_cache_scheme or
                                  // hf_quant_config.json; "" when none. Unknown declarations throw.
};

// Throws InputError naming the file, the key, the value and the alternatives.
ModelConfig ReadConfig(const std::string& folder);

}  // namespace kvanta::models
