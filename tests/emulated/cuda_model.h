// Kernels of a model's operations, emulated.
#pragma once

#include "kernels/cuda/model_work.h"

namespace kvanta::testing {

// Throws EmulationError.
void RunModel(const kernels::cuda::ModelWork& work);

}  // namespace kvanta::testing
