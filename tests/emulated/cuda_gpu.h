// An emulated GPU: guarded host memory, and the kernels' own source on emulated/cuda_grid.h.
#pragma once

#include <memory>

#include "kernels/cuda/cuda_context.h"

namespace kvanta::testing {

// Launches do not throw; the device's Synchronize throws the first error as EmulationError.
std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu();

}  // namespace kvanta::testing
