#include "kernels/cuda/cuda_context.h"

#include <fmt/format.h>

#include "kernels/cuda/probe.h"
#include "kvanta/error.h"

namespace kvanta::kernels {

#ifdef KVANTA_HAS_CUDA
std::string MissingForCuda() {
  const CudaProbe probe = ProbeCuda();
  const auto version = [](int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); };
  if (probe.driver_missing) return "this machine has no NVIDIA driver";
  if (probe.driver_old) {
    return fmt::format("the NVIDIA driver knows CUDA {}, this build needs {}", version(probe.driver_version),
                       version(probe.runtime_version));
  }
  if (probe.error != 0) return fmt::format("the CUDA runtime says: {}", probe.error_text);
  if (probe.devices == 0) return "this machine has an NVIDIA driver, but no GPU that it may use";
  if (probe.capability < kMinCapability) {
    return fmt::format("{} has compute capability {}.{}, the kernels need {}.{} or more", probe.name,
                       probe.capability / 10, probe.capability % 10, kMinCapability / 10, kMinCapability % 10);
  }
  return "";
}

std::string CudaUnit() {
  if (!MissingForCuda().empty()) return "";
  return ProbeCuda().capability >= 90 ? "sm90" : "sm80";  // what the code is made for
}
#else
std::string MissingForCuda() {
  return "this build is without CUDA (KVANTA_CUDA=OFF, or no usable nvcc was found)";
}

std::string CudaUnit() {
  return "";
}

std::shared_ptr<CudaContext> MakeCudaContext() {
  throw ResourceError(MissingForCuda());
}
#endif

}  // namespace kvanta::kernels
