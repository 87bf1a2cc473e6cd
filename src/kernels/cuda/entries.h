// Launches of Append's and attention's kernels, which nvcc compiles.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/attention/cuda/launch.h"

namespace kvanta::kernels::cuda {

// max_blocks: of the grid, which takes rows by turns.
void LaunchAppend(int kernel, const AppendParams& side, int max_blocks, cudaStream_t stream);
// blocks: of the grid, which takes tasks by turns.
void LaunchAttend(int kernel, const AttentionParams& layer, int blocks, cudaStream_t stream);
// LaunchAttend's of latents, in a unit of its own.
void LaunchLatents(const AttentionParams& layer, int blocks, cudaStream_t stream);
void LaunchCombine(const AttentionParams& layer, cudaStream_t stream);

}  // namespace kvanta::kernels::cuda
