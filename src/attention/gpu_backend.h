// Attention on a GPU, over pages in device memory.
#pragma once

#include <memory>

#include "attention/backend.h"
#include "attention/gpu_schedule.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::attention {

// `pool` must be in the GPU's memory and outlive the backend; pointers given to Append and Run are device memory, too.
// Throws InputError if the config does not match the cache's layout or no kernel supports a layer. Plans divide
// tiles among blocks up to `max_result_rows` rows of split results. `makes_groups`: tiles of prompts share what a block
// decodes, by kernels that take tile groups.
std::unique_ptr<Backend> MakeGpuBackend(cache::PagePool& pool, BackendConfig config,
                                        std::shared_ptr<kernels::CudaContext> gpu,
                                        int64_t max_result_rows = kMaxResultRows, bool makes_groups = true);

}  // namespace kvanta::attention
