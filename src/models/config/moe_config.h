// Keys of mixtures of experts that architectures share.
#pragma once

#include <string_view>

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

inline constexpr int kMaxExperts = 4096;
inline constexpr int64_t kMaxExpertWidth = int64_t{1} << 20;

// Sets num_experts, num_experts_per_tok and moe_intermediate_size; the first and the last from these keys.
void ReadExpertCounts(const JsonObject& json, std::string_view experts_key, std::string_view width_key,
                      ModelConfig& config);

// Sets groups of experts from n_group and topk_group; one group where the keys are absent.
void ReadExpertGroups(const JsonObject& json, std::string_view experts_key, ModelConfig& config);

// Sets everything but the layers of experts that DeepSeek V3 chooses by sigmoid scores and a correction bias, and their
// shared experts; the numbers of both from these keys.
void ReadSigmoidExperts(const JsonObject& json, std::string_view experts_key, std::string_view shared_key,
                        ModelConfig& config);

// Marks the layers from `first` on as layers of experts.
void MarkSparseLayers(int64_t first, ModelConfig& config);

// Marks the layers of experts by mlp_layer_types, "sparse" or "dense"; without the key, those from `first` on.
void ReadMlpLayerTypes(const JsonObject& json, int64_t first, ModelConfig& config);

// Marks the layers of experts by decoder_sparse_step and mlp_only_layers (Qwen2-MoE and Qwen3-MoE).
void ReadSparseLayers(const JsonObject& json, ModelConfig& config);

}  // namespace kvanta::models
