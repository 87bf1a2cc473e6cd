// nvcc unit of the attention and combine kernels.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/attention_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(kAttendWarps* kWarp, Kernel::kBlocksPerSm)
    AttentionEntry(const __grid_constant__ AttentionParams params) {
  AttentionBlock<Kernel>::Run(params);
}

__global__ void __launch_bounds__(kCombineWarps* kWarp) CombineEntry(const __grid_constant__ AttentionParams params) {
  CombineBlock(params);
}

template <class Kernel>
void Launch(const AttentionParams& params, int blocks, cudaStream_t stream) {
  static std::atomic<int> shared_limit{kDefaultSharedBytes};
  const int shared = AttentionBlock<Kernel>::SharedBytes(params);
  RaiseSharedLimit(&AttentionEntry<Kernel>, shared, shared_limit);
  AttentionEntry<Kernel><<<blocks, kAttendWarps * kWarp, shared, stream>>>(params);
}

template <>
void Launch<LatentBlock>(const AttentionParams& params, int blocks, cudaStream_t stream) {
  LaunchLatents(params, blocks, stream);
}

template <class... Kernel>
void LaunchFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params, int blocks,
                cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AttentionParams&, int, cudaStream_t) = {&Launch<Kernel>...};
  kLaunches[kernel](params, blocks, stream);
}

}  // namespace

void LaunchAttend(int kernel, const AttentionParams& params, int blocks, cudaStream_t stream) {
  LaunchFrom(AttentionKernels{}, kernel, params, blocks, stream);
}

void LaunchCombine(const AttentionParams& params, cudaStream_t stream) {
  const LaunchShape shape = CombineShape(params);
  CombineEntry<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
                 static_cast<size_t>(shape.shared_bytes), stream>>>(params);
}

}  // namespace kvanta::kernels::cuda
