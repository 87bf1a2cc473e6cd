// Launch functions of the nvcc units (*_entries.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/cuda/model_ops.h"

namespace kvanta::kernels::cuda {

// True if the current device is of compute capability 9.0 or more.
bool OverlapsLaunches() noexcept;

// `kernel`: index from FindAppend.
void LaunchAppend(int kernel, const AppendSides& sides, cudaStream_t stream);
// `kernel`: index from FindAttend. The grid is as many blocks as are resident (grid-stride loop over work items).
LaunchShape AttendShape(int kernel, const AttentionParams& params, int multiprocessors);
void LaunchAttend(int kernel, const AttentionParams& params, int multiprocessors, cudaStream_t stream);
// The same for tile groups, a unit of its own: a grid of no blocks for kernels that do not take them, or need more
// shared memory than a block may have, and on a GPU on which their products would have other bits (product_check.h).
LaunchShape GroupShape(int kernel, const AttentionParams& params, int multiprocessors);
void LaunchGroups(int kernel, const AttentionParams& params, int multiprocessors, cudaStream_t stream);
// The same for latents, units of their own.
LaunchShape LatentShape(const AttentionParams& params, int multiprocessors);
void LaunchLatents(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
LaunchShape LatentGroupShape(const AttentionParams& params, int multiprocessors);
void LaunchLatentGroups(const AttentionParams& params, int multiprocessors, cudaStream_t stream);
// LaunchOp for scores of tokens, in the same unit.
void LaunchScore(const ScoreTokensOp& op, cudaStream_t stream);
void LaunchCombine(const AttentionParams& params, cudaStream_t stream);

// Any operation of a model.
void LaunchOp(const ModelOp& op, cudaStream_t stream);
// LaunchOp for linear layers, a unit of its own.
void LaunchLinear(const LinearOp& op, cudaStream_t stream);

// Launches `kernel`, which begins with WaitForPreviousLaunches: on GPUs that can, its blocks start while those before
// it end.
template <class Params>
void LaunchKernel(void (*kernel)(Params), const LaunchShape& shape, cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute overlaps{};
  overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlaps.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = &overlaps;
  config.numAttrs = OverlapsLaunches() ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  // CudaContext reads the error.
  cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

// Dynamic shared memory that a block of the current device may have.
inline int SharedBytesPerBlock() {
  int device = 0;
  int bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

inline constexpr int kDefaultSharedBytes = 48 << 10;  // dynamic shared memory without opt-in

// Raises the kernel's dynamic shared memory limit to `bytes`. `shared_limit`: the kernel's current limit. If the device
// has less, the launch fails and reports it.
template <class Kernel>
void RaiseSharedLimit(Kernel* kernel, int bytes, std::atomic<int>& shared_limit) {
  if (bytes <= shared_limit.load()) return;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess) {
    shared_limit.store(bytes);
  }
}

// As many blocks of a kernel as are resident at once, remembered for the last size of dynamic shared memory.
class ResidentBlocks {
 public:
  template <class Kernel>
  LaunchShape Shape(Kernel* kernel, int threads, int shared_bytes, int multiprocessors) {
    RaiseSharedLimit(kernel, shared_bytes, shared_limit_);
    return {.blocks = int64_t{multiprocessors} * PerSm(kernel, threads, shared_bytes),
            .threads = threads,
            .shared_bytes = shared_bytes};
  }

 private:
  template <class Kernel>
  int PerSm(Kernel* kernel, int threads, int shared_bytes) {
    const uint64_t known = known_.load();
    if (known != 0 && static_cast<int>(known >> 32U) == shared_bytes) return static_cast<int>(known & 0xffffffffU);
    int blocks = 0;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared_bytes)) !=
            cudaSuccess ||
        blocks < 1) {
      blocks = 1;  // the launch reports the error
    }
    known_.store((static_cast<uint64_t>(shared_bytes) << 32U) | static_cast<uint64_t>(blocks));
    return blocks;
  }

  std::atomic<int> shared_limit_{kDefaultSharedBytes};
  std::atomic<uint64_t> known_{0};
};

}  // namespace kvanta::kernels::cuda
