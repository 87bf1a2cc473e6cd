// Linear layers' kernels, one for each way to keep W and each tile.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/linear/cuda/linear_kernels.h"
#include "kernels/cuda/model_entries.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(kLinearWarps* kWarp) LinearEntry(const __grid_constant__ LinearWork work) {
  Kernel::Run(work);
}

struct Launcher {
  cudaStream_t stream;

  template <class Kernel>
  void Launch(const LinearWork& work) const {
    const LaunchShape shape = Kernel::Shape(work);
    if (shape.shared_bytes > 48 << 10) {
      static const cudaError_t raised =
          cudaFuncSetAttribute(&LinearEntry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
      static_cast<void>(raised);  // the launch fails, then
    }
    LinearEntry<Kernel><<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
                          static_cast<size_t>(shape.shared_bytes), stream>>>(work);
  }
};

}  // namespace

void LaunchLinear(const LinearWork& work, cudaStream_t stream) {
  LaunchBy(work, Launcher{stream});
}

}  // namespace kvanta::kernels::cuda
