#include "models/kv_scale_names.h"

#include "weights/module_names.h"

#include <algorithm>
#include <array>

namespace kvanta::models {
namespace {

struct ScaleName {
  std::string_view tail;  // whole components at the end of the tensor's name
  ScaleRole role;
};

// Every name under which producers store them.
constexpr std::array kNames = std::to_array<ScaleName>({
    {"kv_scale", ScaleRole::kBoth},  // before vLLM 0.6.3
    {"self_attn.k_proj.k_scale", ScaleRole::kK},
    {"self_attn.v_proj.v_scale", ScaleRole::kV},  // ModelOpt
    {"self_attn.qkv_proj.k_scale", ScaleRole::kK},
    {"self_attn.qkv_proj.v_scale", ScaleRole::kV},
    {"self_attn.qkqkv_proj.k_scale", ScaleRole::kK},
    {"self_attn.qkqkv_proj.v_scale", ScaleRole::kV},
    {"self_attn.k_mean", ScaleRole::kKeyMean},
    {"self_attn.k_query", ScaleRole::kKeyQuery},
    {"self_attn.k_eigen", ScaleRole::kKeyEigen},
    {"self_attn.q_scale", ScaleRole::kIgnored},
    {"self_attn.k_scale", ScaleRole::kK},  // llm-compressor
    {"self_attn.v_scale", ScaleRole::kV},
    {"self_attn.attn.q_scale", ScaleRole::kIgnored},
    {"self_attn.attn.k_scale", ScaleRole::kK},
    {"self_attn.attn.v_scale", ScaleRole::kV},
    {"mixer.k_proj.k_scale", ScaleRole::kK},
    {"mixer.v_proj.v_scale", ScaleRole::kV},
    {"self_attn.q.scale", ScaleRole::kIgnored},
    {"self_attn.k_cache.scale", ScaleRole::kK},
    {"self_attn.v_cache.scale", ScaleRole::kV},
    {"q_proj.output_scale", ScaleRole::kIgnored},  // Quark
    {"k_proj.output_scale", ScaleRole::kK},
    {"v_proj.output_scale", ScaleRole::kV},
    {"self_attn.prob_output_scale", ScaleRole::kIgnored},
    {"attention.kv_cache_scaling_factor", ScaleRole::kBoth},  // TensorRT-LLM
    {"q_zero_point", ScaleRole::kIgnored},
    {"k_zero_point", ScaleRole::kZero},
    {"v_zero_point", ScaleRole::kZero},
    {"k_proj.k_bias", ScaleRole::kKeyMean},  // ModelOpt's affine algorithms
    {"v_proj.v_bias", ScaleRole::kValueBias},
    {"k_proj.kv_cache_scale", ScaleRole::kInt8K},  // msModelSlim's C8, vLLM Ascend
    {"v_proj.kv_cache_scale", ScaleRole::kInt8V},
    {"k_proj.kv_cache_offset", ScaleRole::kInt8KOffset},
    {"v_proj.kv_cache_offset", ScaleRole::kInt8VOffset},
    {"self_attn.prob_scale", ScaleRole::kIgnored},
    {"attn.prob_scale", ScaleRole::kIgnored},
    {"q_global_scale", ScaleRole::kIgnored},
    {"k_global_scale", ScaleRole::kIgnored},  // compressed-tensors' NVFP4: blocks have scales of their own
    {"v_global_scale", ScaleRole::kIgnored},
});

}  // namespace

std::optional<ScaleRole> RoleOf(std::string_view tensor) {
  for (const ScaleName& name : kNames) {
    if (!tensor.ends_with(name.tail)) continue;
    if (tensor.size() == name.tail.size() || tensor[tensor.size() - name.tail.size() - 1] == '.') return name.role;
  }
  return std::nullopt;
}

bool IsKvScaleTensor(std::string_view tensor) {
  return RoleOf(tensor).has_value() && weights::LayerOf(tensor).has_value();
}

bool LooksLikeKvScale(std::string_view tensor) {
  const std::string_view last = tensor.substr(tensor.rfind('.') + 1);
  for (const std::string_view side : {"k_", "v_", "kv_", "key_", "value_"}) {
    for (const std::string_view what :
         {"scale", "scales", "scale_inv", "cache_scale", "scaling_factor", "cache_scaling_factor"}) {
      if (last.size() == side.size() + what.size() && last.starts_with(side) && last.ends_with(what)) return true;
    }
  }
  return false;
}

}  // namespace kvanta::models
