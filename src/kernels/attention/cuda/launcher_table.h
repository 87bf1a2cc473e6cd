// Tables from an index in a list of kernels to their launchers, for nvcc units. Launcher<Kernel>::Shape and
// Launcher<Kernel>::Launch are a unit's own.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/attention/cuda/attention_params.h"
#include "kernels/attention/cuda/kernel_list.h"

namespace kvanta::kernels::cuda {

template <template <class> class Launcher, class... Kernel>
LaunchShape ShapeFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params, int multiprocessors) {
  constexpr LaunchShape (*kShapes[])(const AttentionParams&, int) = {&Launcher<Kernel>::Shape...};
  return kShapes[kernel](params, multiprocessors);
}
template <template <class> class Launcher, class... Kernel>
void LaunchFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params, int multiprocessors,
                cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AttentionParams&, int, cudaStream_t) = {&Launcher<Kernel>::Launch...};
  kLaunches[kernel](params, multiprocessors, stream);
}

}  // namespace kvanta::kernels::cuda
