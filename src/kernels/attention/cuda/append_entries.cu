// nvcc unit of the append kernels, one per format, and for pairs.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/append_kernel.h"
#include "kernels/attention/cuda/kernel_list.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Listed>
__global__ void __launch_bounds__(AppendKernelOf<Listed>::kThreads)
    AppendEntry(const __grid_constant__ AppendSides sides) {
  WaitForPreviousLaunches();
  AppendKernelOf<Listed>::Run(sides);
}

template <class Listed>
void Launch(const AppendSides& sides, cudaStream_t stream) {
  LaunchKernel(&AppendEntry<Listed>, AppendKernelOf<Listed>::Shape(sides), stream, sides);
}

template <class... Listed>
void LaunchFrom(TypeList<Listed...> /*list*/, int kernel, const AppendSides& sides, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AppendSides&, cudaStream_t) = {&Launch<Listed>...};
  kLaunches[kernel](sides, stream);
}

}  // namespace

void LaunchAppend(int kernel, const AppendSides& sides, cudaStream_t stream) {
  LaunchFrom(AppendKernels{}, kernel, sides, stream);
}

}  // namespace kvanta::kernels::cuda
