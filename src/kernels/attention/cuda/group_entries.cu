// nvcc unit of the attention kernels for tile groups.
#include "kernels/cuda/primitives_nvcc.h"
#include "kernels/cuda/warpgroup_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/group_block.h"
#include "kernels/attention/cuda/launcher_table.h"
#include "kernels/attention/cuda/product_check.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(GroupBlock<Kernel, false>::kThreads, Kernel::kGroupBlocksPerSm)
    GroupEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  GroupBlock<Kernel, kHasWarpgroupMma && WarpgroupTile<Kernel>::kFits>::Run(params);
}

__global__ void __launch_bounds__(ProductCheck::kThreads) ProductCheckEntry(int64_t* differences) {
  if (ThreadIndex() == 0) *differences = 0;
  if constexpr (kHasWarpgroupMma) ProductCheck::Run(differences);
}

// True if products of warpgroups, where the process's GPU has them, have the bits of those of warps.
bool ProductsAreAlike() {
  static const bool alike = [] {
    int64_t differences = -1;
    int64_t* on_device = nullptr;
    bool ran = cudaMalloc(&on_device, sizeof(int64_t)) == cudaSuccess;
    if (ran) {
      ProductCheckEntry<<<1, ProductCheck::kThreads, ProductCheck::kSharedBytes>>>(on_device);
      ran = cudaGetLastError() == cudaSuccess &&
            cudaMemcpy(&differences, on_device, sizeof(int64_t), cudaMemcpyDeviceToHost) == cudaSuccess;
      cudaFree(on_device);
    }
    if (!ran) cudaGetLastError();  // single tiles need no more; later launches would report it
    return ran && differences == 0;
  }();
  return alike;
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
  using Block = GroupBlock<Kernel, false>;
  static LaunchShape Shape(const AttentionParams& params, int multiprocessors) {
    static ResidentBlocks resident;
    const int bytes = Block::SharedBytes(params);
    if (bytes > SharedBytesPerBlock() || !ProductsAreAlike()) return {};
    return resident.Shape(&GroupEntry<Kernel>, Block::kThreads, bytes, multiprocessors);
  }
  static void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
    LaunchKernel(&GroupEntry<Kernel>, Shape(params, multiprocessors), stream, params);
  }
};
template <>
struct Launcher<LatentBlock> {
  static LaunchShape Shape(const AttentionParams& params, int multiprocessors) {
    return LatentGroupShape(params, multiprocessors);
  }
  static void Launch(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
    LaunchLatentGroups(params, multiprocessors, stream);
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
