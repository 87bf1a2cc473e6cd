// nvcc unit of the latent (MLA) attention kernels for tile groups.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Format>
__global__ void __launch_bounds__(LatentGroupBlock<Format>::kThreads, 1)
    LatentGroupEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  LatentGroupBlock<Format>::Run(params);
}

template <class Format>
LaunchShape ShapeOf(const AttentionParams& params, int multiprocessors) {
  using Block = LatentGroupBlock<Format>;
  static ResidentBlocks resident;
  const int bytes = Block::SharedBytes(params);
  if (bytes == 0 || bytes > SharedBytesPerBlock()) return {};
  return resident.Shape(&LatentGroupEntry<Format>, Block::kThreads, bytes, multiprocessors);
}

}  // namespace

LaunchShape LatentGroupShape(const AttentionParams& params, int multiprocessors) {
  LaunchShape shape;
  VisitLatentGroup(
      params, [&]<class Format>(const LatentGroupBlock<Format>*) { shape = ShapeOf<Format>(params, multiprocessors); });
  return shape;
}
void LaunchLatentGroups(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  VisitLatentGroup(params, [&]<class Format>(const LatentGroupBlock<Format>*) {
    LaunchKernel(&LatentGroupEntry<Format>, ShapeOf<Format>(params, multiprocessors), stream, params);
  });
}

}  // namespace kvanta::kernels::cuda
