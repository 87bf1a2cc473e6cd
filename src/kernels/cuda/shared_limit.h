// Shared memory beyond what every kernel may have, which has to be asked for.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace kvanta::kernels::cuda {

inline constexpr int kSharedOfAny = 48 << 10;  // bytes

// `allowed`: what this kernel may have so far. Where more is not to be had, the launch fails, and says so.
template <class Kernel>
void AllowShared(Kernel* kernel, int bytes, std::atomic<int>& allowed) {
  if (bytes <= allowed.load()) return;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) {
    allowed.store(bytes);
  }
}

}  // namespace kvanta::kernels::cuda
