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
    AppendEntry(const __grid_constant__ AppendParams params) {
  WaitForPreviousLaunches();
  AppendKernel<Format>::Run(params);
}

template <class Format>
void Launch(const AppendParams& params, int max_blocks, cudaStream_t stream) {
  LaunchKernel(&AppendEntry<Format>, AppendKernel<Format>::Shape(params, max_blocks), stream, params);
}

template <class... Format>
void LaunchFrom(TypeList<Format...> /*list*/, int kernel, const AppendParams& params, int max_blocks,
                cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AppendParams&, int, cudaStream_t) = {&Launch<Format>...};
  kLaunches[kernel](params, max_blocks, stream);
}

}  // namespace

void LaunchAppend(int kernel, const AppendParams& params, int max_blocks, cudaStream_t stream) {
  LaunchFrom(AppendFormats{}, kernel, params, max_blocks, stream);
}

}  // namespace kvanta::kernels::cuda
