// Launches of the kernels of a model's operations, which nvcc compiles.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/model_work.h"

namespace kvanta::kernels::cuda {

// Any operation of a model; linear layers are LaunchLinear's.
void LaunchModel(const ModelWork& work, cudaStream_t stream);
void LaunchLinear(const LinearWork& work, cudaStream_t stream);

}  // namespace kvanta::kernels::cuda
