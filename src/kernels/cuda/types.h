// Plain types shared by the host, nvcc and the emulation: launch shapes and vector loads.
#pragma once

#include <cstdint>

namespace kvanta::kernels::cuda {

inline constexpr int kWarp = 32;                    // lanes
inline constexpr float kLog2E = 1.44269504088896F;  // log2(e)

struct LaunchShape {
  int64_t blocks = 0;
  int threads = 0;  // per block
  int shared_bytes = 0;
};

// 16 and 8 bytes: one vectorized load or store.
struct alignas(16) Vec4 {
  uint32_t word[4];
};
struct alignas(8) Vec2 {
  uint32_t word[2];
};

}  // namespace kvanta::kernels::cuda
