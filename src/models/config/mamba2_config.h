// Keys of Mamba-2 layers that architectures share.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/json.h"
#include "models/config/config.h"

namespace kvanta::models {

struct Mamba2Keys {
  std::string_view heads = "mamba_n_heads", head_dim = "mamba_d_head", groups = "mamba_n_groups";
  std::string_view state_size = "mamba_d_state", conv_width = "mamba_d_conv";
  std::string_view conv_bias = "mamba_conv_bias", proj_bias = "mamba_proj_bias";
};

// Sets config.mamba2 but for the gate, from these keys and time_step_limit. `width`: channels of all heads together, by
// which head_dim may be left out or "auto"; 0: it is needed.
void ReadMamba2(const JsonObject& json, const Mamba2Keys& keys, int64_t width, ModelConfig& config);

// The same with the class's width, mamba_expand times hidden_size.
void ReadExpandedMamba2(const JsonObject& json, ModelConfig& config);

}  // namespace kvanta::models
