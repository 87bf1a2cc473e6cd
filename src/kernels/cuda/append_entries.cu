// Append's kernels, one for each format.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/cuda/append_kernel.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Format>
__global__ void __launch_bounds__(AppendGrid<Format>::kThreads) AppendEntry(const __grid_constant__ AppendSide side) {
  AppendGrid<Format>::Run(side);
}

template <class Format>
void Launch(const AppendSide& side, cudaStream_t stream) {
  using Grid = AppendGrid<Format>;
  AppendEntry<Format><<<Grid::BlockCount(side), Grid::kThreads, Grid::kSharedBytes, stream>>>(side);
}

template <class... Format>
void LaunchOf(TypeList<Format...> /*list*/, int kernel, const AppendSide& side, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AppendSide&, cudaStream_t) = {&Launch<Format>...};
  kLaunches[kernel](side, stream);
}

}  // namespace

void LaunchAppend(int kernel, const AppendSide& side, cudaStream_t stream) {
  LaunchOf(AppendFormats{}, kernel, side, stream);
}

}  // namespace kvanta::kernels::cuda
