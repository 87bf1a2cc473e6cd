// nvcc unit of the latent (MLA) attention kernel and of the scores of sparse attention.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/attention/cuda/score_block.h"
#include "kernels/cuda/entries.h"

namespace kvanta::kernels::cuda {
namespace {

__global__ void __launch_bounds__(LatentBlock::kThreads, LatentBlock::kBlocksPerSm)
    LatentEntry(const __grid_constant__ AttentionParams params) {
  WaitForPreviousLaunches();
  LatentBlock::Run(params);
}

__global__ void __launch_bounds__(ScoreBlock::kThreads, LatentBlock::kBlocksPerSm)
    ScoreEntry(const __grid_constant__ ScoreTokensOp op) {
  WaitForPreviousLaunches();
  ScoreBlock::Run(op);
}

}  // namespace

LaunchShape LatentShape(const AttentionParams& params, int multiprocessors) {
  static ResidentBlocks resident;
  return resident.Shape(&LatentEntry, LatentBlock::kThreads, LatentBlock::SharedBytes(params), multiprocessors);
}
void LaunchLatents(const AttentionParams& params, int multiprocessors, cudaStream_t stream) {
  LaunchKernel(&LatentEntry, LatentShape(params, multiprocessors), stream, params);
}

void LaunchScore(const ScoreTokensOp& op, cudaStream_t stream) {
  static std::atomic<int> shared_limit{kDefaultSharedBytes};
  const LaunchShape shape = ScoreBlock::Shape(op);
  RaiseSharedLimit(&ScoreEntry, shape.shared_bytes, shared_limit);
  LaunchKernel(&ScoreEntry, shape, stream, op);
}

}  // namespace kvanta::kernels::cuda
