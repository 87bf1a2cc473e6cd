// Append's kernels, one for each format.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/cuda/append_kernel.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Format>
__global__ void __launch_bounds__(kAppendWarps* kWarp) AppendEntry(const __grid_constant__ AppendSide side) {
  AppendBlock<Format>(side);
}

template <class Format>
void Launch(const AppendSide& side, cudaStream_t stream) {
  const int items = side.count * side.kv_heads;
  AppendEntry<Format>
      <<<(items + kAppendWarps - 1) / kAppendWarps, kAppendWarps * kWarp, kAppendWarps * kAppendBytes, stream>>>(side);
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
