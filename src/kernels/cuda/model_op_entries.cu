// nvcc unit of a model's operations, except linear layers.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include <type_traits>
#include <variant>

#include "kernels/attention/cuda/gather_rows_kernel.h"
#include "kernels/compression/cuda/compressor_kernels.h"
#include "kernels/cuda/entries.h"
#include "kernels/cuda/row_kernels.h"
#include "kernels/hyper_connections/cuda/stream_kernels.h"
#include "kernels/linear/cuda/pack_kernel.h"
#include "kernels/linear_attention/cuda/gated_norm_kernel.h"
#include "kernels/linear_attention/cuda/state_scan_kernel.h"
#include "kernels/moe/cuda/expert_kernels.h"
#include "kernels/sampling/cuda/sample_kernel.h"

namespace kvanta::kernels::cuda {
namespace {

template <class Op>
__global__ void __launch_bounds__(kRowThreads) OpEntry(const __grid_constant__ Op op) {
  WaitForPreviousLaunches();
  RunBlock(op);
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads) ScanEntry(const __grid_constant__ StateScanOp op) {
  WaitForPreviousLaunches();
  Kernel::Run(op);
}

struct ScanLauncher {
  cudaStream_t stream;

  template <class Kernel>
  void Launch(const StateScanOp& op) const {
    LaunchKernel(&ScanEntry<Kernel>, Kernel::Shape(op), stream, op);
  }
};

}  // namespace

void LaunchOp(const ModelOp& model_op, cudaStream_t stream) {
  const auto launch = [&]<class Op>(const Op& op) {
    if constexpr (std::is_same_v<Op, LinearOp>) {
      LaunchLinear(op, stream);
    } else if constexpr (std::is_same_v<Op, ScoreTokensOp>) {
      LaunchScore(op, stream);
    } else if constexpr (std::is_same_v<Op, StateScanOp>) {
      LaunchScanKernel(op, ScanLauncher{stream});
    } else {
      const LaunchShape shape = ShapeOf(op);
      LaunchKernel(&OpEntry<Op>, shape, stream, op);
    }
  };
  std::visit(launch, model_op);
}

}  // namespace kvanta::kernels::cuda
