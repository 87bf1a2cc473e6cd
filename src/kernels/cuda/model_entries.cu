// The kernels of a model's operations but for linear layers.
#include "kernels/cuda/primitives_nvcc.h"
// Primitives first.
#include "kernels/sampling/cuda/sample_kernel.h"
#include "kernels/moe/cuda/expert_kernels.h"
#include "kernels/cuda/model_entries.h"
#include "kernels/linear/cuda/pack_kernel.h"
#include "kernels/cuda/row_kernels.h"

#include <type_traits>
#include <variant>

namespace kvanta::kernels::cuda {
namespace {

template <class Work>
__global__ void __launch_bounds__(kRowThreads) RowEntry(const __grid_constant__ Work work) {
  RunBlock(work);
}

}  // namespace

void LaunchModel(const ModelWork& work, cudaStream_t stream) {
  const auto launch = [&]<class Work>(const Work& rows) {
    if constexpr (std::is_same_v<Work, LinearWork>) {
      LaunchLinear(rows, stream);
    } else {
      const LaunchShape shape = ShapeOf(rows);
      RowEntry<<<static_cast<unsigned>(shape.blocks), static_cast<unsigned>(shape.threads),
                 static_cast<size_t>(shape.shared_bytes), stream>>>(rows);
    }
  };
  std::visit(launch, work);
}

}  // namespace kvanta::kernels::cuda
