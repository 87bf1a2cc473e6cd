// nvcc unit of the latent (MLA) attention kernel.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

__global__ void __launch_bounds__(LatentBlock::kThreads, LatentBlock::kBlocksPerSm)
    LatentEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  LatentBlock::Run(params);
}

}  // namespace

LaunchShape LatentShape(const AttentionParams& params, int multiprocessors) {
  static ResidentBlocks resident;
  return resident.Shape(&LatentEntry, LatentBlock::kThreads, LatentBlock::SharedBytes(params), multiprocessors);
}
void LaunchLatents(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchKernel(&LatentEntry, LatentShape(params, multiprocessors), stream, params);
}

}  // namespace kvanta::kernels::cuda
