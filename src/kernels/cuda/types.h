// Plain types shared by the host, nvcc and the emulation: launch shapes, vector loads and operands.
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

// The B operand of a warpgroup's product in shared memory: 16 k by columns n of 16 bits, as core matrices of 8 n by
// 8 k. A core matrix is 128 bytes, 16 for each n. Offsets in bytes: of the first, and to the next in k and in n.
struct CoreMatrices {
  int offset;
  int k_stride;
  int n_stride;
};

}  // namespace kvanta::kernels::cuda
