// Addresses of a GPU whose memory is taken and given back piecewise.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "base/device.h"

namespace kvanta::kernels {

// Physical memory is mapped in the GPU's units (2 MiB) as parts of them are committed; `stream` is waited for before
// any is taken away. Managed memory would do without, but moves pages on its own, and asked for more than there is it
// can hang a GPU. Throws ResourceError.
std::unique_ptr<Reservation> ReserveCudaMemory(size_t bytes, int device, cudaStream_t stream);

}  // namespace kvanta::kernels
