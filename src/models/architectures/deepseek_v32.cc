// DeepSeek V3.2 and GLM-5: latent attention to the tokens that an indexer selects (DeepSeek Sparse Attention), experts
// of GLM-4.7-Flash. transformers: models/deepseek_v32/modeling_deepseek_v32.py,
// models/glm_moe_dsa/modeling_glm_moe_dsa.py.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "models/architecture.h"
#include "models/config/mla_config.h"
#include "models/config/moe_config.h"

namespace kvanta::models {
namespace {

// interleaves: the indexer's rope where the file does not say it.
void ReadSparseLatents(const JsonObject& json, bool interleaves, ModelConfig& config) {
  ReadMla(json, config);
  if (!json.BoolOrNull("rope_interleave", true)) json.Fail("rope_interleave", "true");
  ReadIndexer(json, config);
  config.indexer.rope_interleave = json.BoolOrNull("indexer_rope_interleave", interleaves);
  config.num_nextn_predict_layers = static_cast<int>(json.Int("num_nextn_predict_layers", 0, 64, 0));
  ReadSigmoidExperts(json, "n_routed_experts", "n_shared_experts", config);
  if (json.Int("moe_layer_freq", 1, 1, 1) != 1) json.Fail("moe_layer_freq", "1");
  ReadMlpLayerTypes(json, json.Int("first_k_dense_replace", 0, int64_t{1} << 20, 3), config);
}

void ReadDeepseekV32(const JsonObject& json, ModelConfig& config) {
  ReadSparseLatents(json, false, config);
}

// True for each layer that uses the selection of an earlier one.
std::vector<bool> ReadSharedSelections(const JsonObject& json, int layers) {
  const auto count = static_cast<size_t>(layers);
  std::vector<bool> shared;
  const auto read = [&](const char* key, std::string_view full, std::string_view other) {
    const Json& types = json.Get(key);
    const auto is_type = [&](const Json& type) { return type == full || type == other; };
    if (!types.is_array() || types.size() != count || !std::ranges::all_of(types, is_type)) {
      json.Fail(key, fmt::format("'{}' or '{}' for each of {} layers", full, other, layers));
    }
    for (const Json& type : types) shared.push_back(type == other);
  };
  constexpr const char *kTypes = "indexer_types", *kPattern = "index_topk_pattern";
  if (json.Has(kTypes)) {
    read(kTypes, "full", "shared");
  } else if (json.Has(kPattern) && json.Get(kPattern).is_string()) {  // "FSSF..."
    const std::string pattern = json.String(kPattern);
    if (pattern.size() != count || pattern.find_first_not_of("FS") != std::string::npos) {
      json.Fail(kPattern, fmt::format("F or S for each of {} layers", layers));
    }
    for (const char type : pattern) shared.push_back(type == 'S');
  } else if (json.Has(kPattern)) {
    read(kPattern, "full", "shared");
  } else {
    const int64_t step = std::max<int64_t>(1, json.Int("index_topk_freq", 0, 1 << 20, 1));
    const int64_t offset = json.Int("index_skip_topk_offset", 0, 1 << 20, 2);
    for (int64_t layer = 0; layer < layers; ++layer) {
      shared.push_back(std::max<int64_t>(layer - offset + 1, 0) % step != 0);
    }
  }
  if (shared.front()) json.Fail(json.Has(kTypes) ? kTypes : kPattern, "an indexer in the first layer");
  return shared;
}

void ReadGlmMoeDsa(const JsonObject& json, ModelConfig& config) {
  ReadSparseLatents(json, true, config);
  ReadSharedIndexers(json, config);
}

// Heads have no one size; this one only replaces hidden_size / num_attention_heads.
constexpr std::string_view kDeepseekV32Defaults = R"({"vocab_size": 129280, "hidden_size": 7168,
  "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
  "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
  "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
  "routed_scaling_factor": 2.5, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
  "max_position_embeddings": 163840, "bos_token_id": 0, "eos_token_id": 1})";
constexpr std::string_view kGlmMoeDsaDefaults = R"({"vocab_size": 154880, "hidden_size": 6144,
  "intermediate_size": 12288, "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64,
  "head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
  "v_head_dim": 256, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
  "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
  "routed_scaling_factor": 2.5, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
  "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1})";

}  // namespace

void ReadSharedIndexers(const JsonObject& json, ModelConfig& config) {
  const std::vector<bool> shared = ReadSharedSelections(json, config.layers);
  for (size_t layer = 0; layer < shared.size(); ++layer) {
    if (shared[layer]) config.layer_specs[layer].selection = TokenSelection::kPrevious;
  }
}

extern const Architecture kDeepseekV32 = {"DeepseekV32ForCausalLM", "deepseek_v32", ReadDeepseekV32,
                                          kDeepseekV32Defaults};
extern const Architecture kGlmMoeDsa = {"GlmMoeDsaForCausalLM", "glm_moe_dsa", ReadGlmMoeDsa, kGlmMoeDsaDefaults};

}  // namespace kvanta::models
