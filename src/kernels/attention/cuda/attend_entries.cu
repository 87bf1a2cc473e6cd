// Attention's kernels, one for each pair of formats and head_dim.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/attention_block.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/shared_limit.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(kAttendWarps* kWarp, Kernel::kResident)
    AttendEntry(const __grid_constant__ AttentionParams layer) {
  AttendBlock<Kernel>::Run(layer);
}

__global__ void __launch_bounds__(kCombineWarps* kWarp) CombineEntry(const __grid_constant__ AttentionParams layer) {
  CombineBlock(layer);
}

template <class Kernel>
void Launch(const AttentionParams& layer, int blocks, cudaStream_t stream) {
  static std::atomic<int> allowed{kSharedOfAny};
  const int shared = AttendBlock<Kernel>::SharedBytes(layer);
  AllowShared(&AttendEntry<Kernel>, shared, allowed);
  AttendEntry<Kernel><<<blocks, kAttendWarps * kWarp, shared, stream>>>(layer);
}

template <>
void Launch<LatentBlock>(const AttentionParams& layer, int blocks, cudaStream_t stream) {
  LaunchLatents(layer, blocks, stream);
}

template <class... Kernel>
void LaunchOf(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& layer, int blocks, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AttentionParams&, int, cudaStream_t) = {&Launch<Kernel>...};
  kLaunches[kernel](layer, blocks, stream);
}

}  // namespace

void LaunchAttend(int kernel, const AttentionParams& layer, int blocks, cudaStream_t stream) {
  LaunchOf(AttendPairs{}, kernel, layer, blocks, stream);
}

void LaunchCombine(const AttentionParams& layer, cudaStream_t stream) {
  const LaunchShape shape = CombineShape(layer);
  CombineEntry<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
               static_cast<size_t>(shape.shared_bytes), stream>>>(layer);
}

}  // namespace kvanta::kernels::cuda
