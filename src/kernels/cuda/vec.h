// Words as kernels for a GPU load them from memory: 16 and 8 bytes at once.
#pragma once

#include <cstdint>

namespace kvanta::kernels::cuda {

struct alignas(16) Vec4 {
  uint32_t word[4];
};
struct alignas(8) Vec2 {
  uint32_t word[2];
};

inline constexpr int kWarp = 32;  // lanes

}  // namespace kvanta::kernels::cuda
