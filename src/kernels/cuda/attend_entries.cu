// Attention's kernels, one for each pair of formats and head_dim.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/cuda/attention_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Pair>
using BlockOf = AttendBlock<typename Pair::K, typename Pair::V, Pair::kDim>;

template <class Pair>
__global__ void __launch_bounds__(kAttendWarps* kWarp) AttendEntry(const __grid_constant__ AttendLayer layer) {
  BlockOf<Pair>::Run(layer);
}

__global__ void __launch_bounds__(kMergeWarps* kWarp) MergeEntry(const __grid_constant__ AttendLayer layer) {
  MergeBlock(layer);
}

template <class Pair>
void Launch(const AttendLayer& layer, int blocks, cudaStream_t stream) {
  constexpr int kShared = BlockOf<Pair>::kSharedBytes;
  if constexpr (kShared > 48 << 10) {
    static const cudaError_t raised =
        cudaFuncSetAttribute(&AttendEntry<Pair>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    static_cast<void>(raised);  // the launch fails, then
  }
  AttendEntry<Pair><<<blocks, kAttendWarps * kWarp, kShared, stream>>>(layer);
}

template <class... Pair>
void LaunchOf(TypeList<Pair...> /*list*/, int kernel, const AttendLayer& layer, int blocks, cudaStream_t stream) {
  constexpr void (*kLaunches[])(const AttendLayer&, int, cudaStream_t) = {&Launch<Pair>...};
  kLaunches[kernel](layer, blocks, stream);
}

}  // namespace

void LaunchAttend(int kernel, const AttendLayer& layer, int blocks, cudaStream_t stream) {
  LaunchOf(AttendPairs{}, kernel, layer, blocks, stream);
}

void LaunchMerge(const AttendLayer& layer, cudaStream_t stream) {
  const int items = layer.tile_count * kQueryRows;
  MergeEntry<<<(items + kMergeWarps - 1) / kMergeWarps, kMergeWarps * kWarp, kMergeWarps * kMergeBytes, stream>>>(
      layer);
}

}  // namespace kvanta::kernels::cuda
