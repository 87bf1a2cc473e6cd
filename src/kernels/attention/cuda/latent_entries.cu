// nvcc unit of the latent (MLA) attention kernel.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kAttendWarps* kWarp, LatentBlock::kBlocksPerSm)
    LatentEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  LatentBlock::Run(params);
}

}  // namespace

void LaunchLatents(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  static std::atomic<int> shared_limit{kDefaultSharedBytes};
  const int shared = LatentBlock::SharedBytes(params);
  RaiseSharedLimit(&LatentEntry, shared, shared_limit);
  static ResidentBlocks resident;
  const int blocks = multiprocessors * resident.PerSm(&LatentEntry, kAttendWarps * kWarp, shared);
  LaunchKernel(&LatentEntry, {.blocks = blocks, .threads = kAttendWarps * kWarp, .shared_bytes = shared}, stream,
               params);
}

}  // namespace kvanta::kernels::cuda
