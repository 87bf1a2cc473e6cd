// An emulated GPU: guarded host memory, and the kernels' own source on emulated/cuda_grid.h.
#pragma once

#include <memory>
#include <string>

#include "kernels/cuda/cuda_context.h"

namespace kvanta::testing {

struct EmulatedGpuOptions {
  std::string nccl_library;  // one that takes the host's memory (CudaContext::NcclLibrary)
  bool warpgroups = true;    // has the products of a warpgroup, as GPUs of compute capability 9.0
};

// Launches do not throw; the device's Synchronize throws the first error as EmulationError.
std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu(EmulatedGpuOptions options = {});

}  // namespace kvanta::testing
