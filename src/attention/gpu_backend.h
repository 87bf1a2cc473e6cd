// Attention on a GPU, in pages of quantized cells that lie in its memory.
#pragma once

#include <memory>

#include "attention/backend.h"
#include "attention/gpu_schedule.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::attention {

// `store` must lie in the GPU's memory, and outlive the backend; pointers that Append and Run are given are of it, too.
// Throws InputError where config and the cache's layout do not fit together, or a layer needs what no kernel does.
// Plans take at most `max_parallel_splits` of partial results apart.
std::unique_ptr<Backend> MakeGpuBackend(cache::PagePool& store, BackendConfig config,
                                        std::shared_ptr<kernels::CudaContext> gpu,
                                        int64_t max_parallel_splits = kMaxParallelSplits);

}  // namespace kvanta::attention
