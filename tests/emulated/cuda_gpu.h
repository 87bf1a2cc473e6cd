// A GPU that is emulated: host memory, and the kernels' own source run by emulated/cuda_grid.h.
#pragma once

#include <memory>

#include "kernels/cuda/cuda_context.h"

namespace kvanta::testing {

// Launches throw nothing; what the emulation stopped at is thrown by Check and by the device's
// Wait, as EmulationError.
std::shared_ptr<kernels::CudaContext> MakeEmulatedGpu();

}  // namespace kvanta::testing
