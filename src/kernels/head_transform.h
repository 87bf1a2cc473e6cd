// Norm and RoPE of query and key heads, as parts of another operation (attention::Backend::AppendHeads).
#pragma once

#include <cstdint>

namespace kvanta::kernels {

// Ops::RmsNorm of each head, then Ops::Rope.
struct HeadTransform {
  const float* norm_weight = nullptr;  // f32 [head_dim], of head h at h * norm_stride; null: no norm
  int32_t norm_stride = 0;
  float norm_eps = 0;
  const float* cos_sin = nullptr;  // f32 [positions][rotary_dim], cos | sin; null: no RoPE
  int32_t rotary_dim = 0;
  bool interleaved = false;
  const int64_t* positions = nullptr;  // [rows]
};

}  // namespace kvanta::kernels
