#include "emulated/cuda_model.h"

#include <type_traits>
#include <variant>

#include "emulated/cuda_primitives.h"
// Primitives first.
#include "kernels/cuda/row_kernels.h"
#include "kernels/linear/cuda/linear_kernels.h"
#include "kernels/linear/cuda/pack_kernel.h"
#include "kernels/moe/cuda/expert_kernels.h"
#include "kernels/sampling/cuda/sample_kernel.h"

namespace kvanta::testing {
namespace {

using namespace kernels::cuda;  // NOLINT(google-build-using-namespace): this is the unit of those kernels

struct Launcher {
  template <class Kernel>
  void Launch(const LinearWork& work) const {
    RunShape(Kernel::Shape(work), [&] { Kernel::Run(work); });
  }
};

}  // namespace

void RunModel(const ModelWork& work) {
  const auto run = []<class Work>(const Work& rows) {
    if constexpr (std::is_same_v<Work, LinearWork>) {
      LaunchBy(rows, Launcher{});
    } else {
      RunShape(ShapeOf(rows), [&] { RunBlock(rows); });
    }
  };
  std::visit(run, work);
}

}  // namespace kvanta::testing
