// Append's kernels, one for each format.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/append_kernel.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Format>
__global__ void __launch_bounds__(AppendGrid<Format>::kThreads) AppendEntry(const __grid_constant__ AppendParams side) {
  AppendGrid<Format>::Run(side);
}

template <class Format>
void Launch(const AppendParams& side, int max_blocks, cudaStream_t stream) {
  const LaunchShape shape = AppendGrid<Format>::Shape(side, max_blocks);
  AppendEntry<Format><<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
                        static_cast<size_t>(shape.shared_bytes), stream>>>(side);
}

template <class... Format>
void LaunchOf(TypeList<Format...> /*list*/, int kernel, const AppendParams& side, int max_blocks, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AppendParams&, int, cudaStream_t) = {&Launch<Format>...};
  kLaunches[kernel](side, max_blocks, stream);
}

}  // namespace

void LaunchAppend(int kernel, const AppendParams& side, int max_blocks, cudaStream_t stream) {
  LaunchOf(AppendFormats{}, kernel, side, max_blocks, stream);
}

}  // namespace kvanta::kernels::cuda
