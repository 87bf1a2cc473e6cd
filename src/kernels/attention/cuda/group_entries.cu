// nvcc unit of the attention kernels for tile groups.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/group_block.h"
#include "kernels/attention/cuda/launcher_table.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(GroupBlock<Kernel>::kThreads, Kernel::kGroupBlocksPerSm)
    GroupEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  GroupBlock<Kernel>::Run(params);
}

// A kernel of the list, if it takes groups.
template <class Listed>
struct Launcher {
  static LaunchShape Shape(const AttentionParams& /*params*/, int /*multiprocessors*/) { return {}; }
  static void Launch(const AttentionParams& /*params*/, int /*multiprocessors*/, cudaStream_t /*stream*/) {}
};
template <class Listed>
requires kTakesGroups<Listed>
struct Launcher<Listed> {
  using Kernel = GroupKernel<Listed>;
  using Block = GroupBlock<Kernel>;
  static LaunchShape Shape(const AttentionParams& params, int multiprocessors) {
    static ResidentBlocks resident;
    const int bytes = Block::SharedBytes(params);
    if (bytes > SharedBytesPerBlock()) return {};
    return resident.Shape(&GroupEntry<Kernel>, Block::kThreads, bytes, multiprocessors);
  }
  static void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
    LaunchKernel(&GroupEntry<Kernel>, Shape(params, multiprocessors), stream, params);
  }
};

}  // namespace

LaunchShape GroupShape(int kernel, const AttentionParams& params, int multiprocessors) {
  return ShapeFrom<Launcher>(AttentionKernels{}, kernel, params, multiprocessors);
}
void LaunchGroups(int kernel, const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchFrom<Launcher>(AttentionKernels{}, kernel, params, multiprocessors, stream);
}

}  // namespace kvanta::kernels::cuda
