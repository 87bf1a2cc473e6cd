// The kernel of attention over latents.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/cuda/entries.h"
#include "kernels/attention/cuda/latent_block.h"
#include "kernels/cuda/shared_limit.h"

namespace kvanta::kernels::cuda {
namespace {

__global__ void __launch_bounds__(kAttendWarps* kWarp, LatentBlock::kResident)
    LatentEntry(const __grid_constant__ AttentionParams layer) {
  LatentBlock::Run(layer);
}

}  // namespace

void LaunchLatents(const AttentionParams& layer, int blocks, cudaStream_t stream) {
  static std::atomic<int> allowed{kSharedOfAny};
  const int shared = LatentBlock::SharedBytes(layer);
  AllowShared(&LatentEntry, shared, allowed);
  LatentEntry<<<blocks, kAttendWarps * kWarp, shared, stream>>>(layer);
}

}  // namespace kvanta::kernels::cuda
