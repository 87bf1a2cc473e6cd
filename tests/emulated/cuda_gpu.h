// An emulated GPU: guarded host memory, and the kernels' own source on emulated/cuda_grid.h.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/cuda_context.h"

namespace kvanta::testing {

// Launches do not throw; the device's Synchronize throws the first error as EmulationError. nccl_library: one that
// takes the host's memory (CudaContext::NcclLibrary).
std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu(std::string nccl_library = "");

}  // namespace kvanta::testing
