// Launch functions of the nvcc units (*_entries.cu).
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/cuda/model_ops.h"

namespace kvanta::kernels::cuda {

// `kernel`: index from FindAppend. max_blocks: grid limit (grid-stride loop over rows).
void LaunchAppend(int kernel, const AppendParams& params, int max_blocks, cudaStream_t stream);
// `kernel`: index from FindAttend. blocks: grid size (grid-stride loop over tasks).
void LaunchAttend(int kernel, const AttentionParams& params, int blocks, cudaStream_t stream);
// LaunchAttend for latents, a unit of its own.
void LaunchLatents(const AttentionParams& params, int blocks, cudaStream_t stream);
void LaunchCombine(const AttentionParams& params, cudaStream_t stream);

// Any operation of a model.
void LaunchOp(const ModelOp& op, cudaStream_t stream);
// LaunchOp for linear layers, a unit of its own.
void LaunchLinear(const LinearOp& op, cudaStream_t stream);

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

}  // namespace kvanta::kernels::cuda
