// nvcc unit of the append kernels, one per format.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/append_kernel.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Format>
__global__ void __launch_bounds__(AppendKernel<Format>::kThreads)
    AppendEntry(const __grid_constant__ AppendSides sides) {
  WaitForPreviousLaunches();
  AppendKernel<Format>::Run(sides);
}

template <class Format>
void Launch(const AppendSides& sides, cudaStream_t stream) {
  LaunchKernel(&AppendEntry<Format>, AppendKernel<Format>::Shape(sides), stream, sides);
}

template <class... Format>
void LaunchFrom(TypeList<Format...> /*list*/, int kernel, const AppendSides& sides, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AppendSides&, cudaStream_t) = {&Launch<Format>...};
  kLaunches[kernel](sides, stream);
}

}  // namespace

void LaunchAppend(int kernel, const AppendSides& sides, cudaStream_t stream) {
  LaunchFrom(AppendFormats{}, kernel, sides, stream);
}

}  // namespace kvanta::kernels::cuda
