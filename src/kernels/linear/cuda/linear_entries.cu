// nvcc unit of the linear layers' kernels.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/cuda/entries.h"
#include "kernels/linear/cuda/linear_kernels.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm)
    LinearEntry(const __grid_constant__ LinearOp op) {
  WaitForPreviousLaunches();
  Kernel::Run(op);
}

struct Launcher {
  cudaStream_t stream;

  template <class Kernel>
  void Launch(const LinearOp& op) const {
    static std::atomic<int> shared_limit{kDefaultSharedBytes};
    const LaunchShape shape = Kernel::Shape(op);
    RaiseSharedLimit(&LinearEntry<Kernel>, shape.shared_bytes, shared_limit);
    LaunchKernel(&LinearEntry<Kernel>, shape, stream, op);
  }
};

}  // namespace

void LaunchLinear(const LinearOp& op, cudaStream_t stream) {
  LaunchLinearKernel(op, Launcher{stream});
}

}  // namespace kvanta::kernels::cuda
