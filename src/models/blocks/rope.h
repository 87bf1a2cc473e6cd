// Rotary position tables, computed with the same f32 operations as transformers (modeling_rope_utils.py).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/device.h"
#include "models/config/config.h"

namespace kvanta::models {

struct RopeFrequencies {
  std::vector<float> inverse;      // [rotary_dim / 2], radians per position
  float attention_scaling = 1.0F;  // multiplies cos and sin (yarn, longrope)
};

// True if the frequencies are divided by `long_factor`: some of the `positions` are beyond the original length
// (docs/adr/0025).
bool UsesLongFactors(const RopeSpec& rope, int64_t positions);
// True if a layer of the model does.
bool UsesLongFactors(const ModelConfig& config, int64_t positions);

// `positions`: length of the longest sequence, which longrope depends on.
RopeFrequencies MakeRopeFrequencies(const RopeSpec& rope, int64_t positions);

// table: f32 [positions][rotary_dim], first half cos, second half sin; table.size() / rotary_dim positions from 0.
void FillRopeTable(const RopeFrequencies& frequencies, std::span<float> table);

// Makes the table that of queries: multiplies each row by the scale of its position (llama_4_scaling_beta).
void ScaleQueryTable(const RopeSpec& rope, std::span<float> table);

// Factors of whole queries by position, [positions]: in layers without rope (AttentionTemperature), or over latents, of
// whose queries only a part is rotated (llama_4_scaling_beta); logarithms of 1 + position
// (MlaConfig::log_query_scales). Empty: none.
std::vector<float> QueryScales(const ModelConfig& config, int64_t positions);

}  // namespace kvanta::models
