// Reserved device address ranges with memory mapped on demand.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "base/device.h"

namespace kvanta::kernels {

// Maps physical memory in granules of the GPU (2 MiB) as their parts are committed, and synchronizes `stream` before
// unmapping any. Not managed memory: it migrates pages on its own and can hang a GPU when oversubscribed. Throws
// ResourceError.
std::unique_ptr<Reservation> ReserveCudaMemory(size_t bytes, int device, cudaStream_t stream);

}  // namespace kvanta::kernels
