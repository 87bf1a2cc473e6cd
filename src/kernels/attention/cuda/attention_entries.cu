// nvcc unit of the attention and combine kernels.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/attention_block.h"
#include "kernels/attention/cuda/launcher_table.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(AttentionBlock<Kernel>::kThreads, Kernel::kBlocksPerSm)
    AttentionEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  AttentionBlock<Kernel>::Run(params);
}

__global__ void __launch_bounds__(kCombineWarps* kWarp) CombineEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  CombineBlock(params);
}

template <class Kernel>
LaunchShape AttentionShape(const AttentionParams& params, int multiprocessors) {
  static ResidentBlocks resident;
  using Block = AttentionBlock<Kernel>;
  return resident.Shape(&AttentionEntry<Kernel>, Block::kThreads, Block::SharedBytes(params), multiprocessors);
}

// A kernel of the list.
template <class Listed>
struct Launcher {
  static LaunchShape Shape(const AttentionParams& params, int multiprocessors) {
    LaunchShape shape;
    VisitKernel<Listed>(params,
                        [&]<class Kernel>(Kernel*) { shape = AttentionShape<Kernel>(params, multiprocessors); });
    return shape;
  }
  static void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
    VisitKernel<Listed>(params, [&]<class Kernel>(Kernel*) {
      LaunchKernel(&AttentionEntry<Kernel>, AttentionShape<Kernel>(params, multiprocessors), stream, params);
    });
  }
};
template <>
struct Launcher<LatentBlock> {
  static LaunchShape Shape(const AttentionParams& params, int multiprocessors) {
    return LatentShape(params, multiprocessors);
  }
  static void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
    LaunchLatents(params, multiprocessors, stream);
  }
};

}  // namespace

LaunchShape AttendShape(int kernel, const AttentionParams& params, int multiprocessors) {
  return ShapeFrom<Launcher>(AttentionKernels{}, kernel, params, multiprocessors);
}
void LaunchAttend(int kernel, const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchFrom<Launcher>(AttentionKernels{}, kernel, params, multiprocessors, stream);
}

void LaunchCombine(const AttentionParams& params, cudaStream_t stream) {
  LaunchKernel(&CombineEntry, CombineShape(params), stream, params);
}

}  // namespace kvanta::kernels::cuda
