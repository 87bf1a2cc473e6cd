// Rotary position tables, computed with the same f32 operations as transformers (modeling_rope_utils.py).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/config.h"

namespace kvanta::models {

struct RopeFrequencies {
  std::vector<float> inverse;      // [rotary_dim / 2], radians per position
  float attention_scaling = 1.0F;  // multiplies cos and sin (yarn)
};

RopeFrequencies MakeRopeFrequencies(const RopeSpec& rope);

// table: f32 [positions][rotary_dim], first half cos, second half sin; table.size() / rotary_dim positions from 0.
void FillRopeTable(const RopeFrequencies& frequencies, std::span<float> table);

}  // namespace kvanta::models
