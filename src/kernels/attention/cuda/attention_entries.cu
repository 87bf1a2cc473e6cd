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
  WaitForPreviousLaunches();
  AttentionBlock<Kernel>::Run(params);
}

__global__ void __launch_bounds__(kCombineWarps* kWarp) CombineEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  CombineBlock(params);
}

template <class Kernel>
void LaunchAttention(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  static std::atomic<int> shared_limit{kDefaultSharedBytes};
  static ResidentBlocks resident;
  const int shared = AttentionBlock<Kernel>::SharedBytes(params);
  RaiseSharedLimit(&AttentionEntry<Kernel>, shared, shared_limit);
  const int blocks = multiprocessors * resident.PerSm(&AttentionEntry<Kernel>, kAttendWarps * kWarp, shared);
  LaunchKernel(&AttentionEntry<Kernel>, {.blocks = blocks, .threads = kAttendWarps * kWarp, .shared_bytes = shared},
               stream, params);
}

template <class Listed>
void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  VisitKernel<Listed>(params, [&]<class Kernel>(Kernel*) { LaunchAttention<Kernel>(params, multiprocessors, stream); });
}

template <>
void Launch<LatentBlock>(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchLatents(params, multiprocessors, stream);
}

template <class... Kernel>
void LaunchFrom(TypeList<Kernel...> /*list*/, int kernel, const AttentionParams& params, int multiprocessors,
                cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AttentionParams&, int, cudaStream_t) = {&Launch<Kernel>...};
  kLaunches[kernel](params, multiprocessors, stream);
}

}  // namespace

void LaunchAttend(int kernel, const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchFrom(AttentionKernels{}, kernel, params, multiprocessors, stream);
}

void LaunchCombine(const AttentionParams& params, cudaStream_t stream) {
  LaunchKernel(&CombineEntry, CombineShape(params), stream, params);
}

}  // namespace kvanta::kernels::cuda
