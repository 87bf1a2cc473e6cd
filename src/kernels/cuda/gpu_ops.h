// The operations of a model on a GPU.
#pragma once

#include <memory>

#include "kernels/cuda/cuda_context.h"
#include "kernels/ops.h"

namespace kvanta::kernels {

// Launches are in the order of the calls; none is waited for. `threads`: for work at load.
std::unique_ptr<Ops> MakeGpuOps(std::shared_ptr<CudaContext> gpu, std::shared_ptr<ThreadPool> threads);

}  // namespace kvanta::kernels
