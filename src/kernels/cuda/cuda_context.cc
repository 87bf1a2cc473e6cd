#include "kernels/cuda/cuda_context.h"

#include <fmt/format.h>

#include "kernels/cuda/probe.h"
#include "kvanta/error.h"

namespace kvanta::kernels {

#ifdef KVANTA_HAS_CUDA
std::string MissingForCuda() {
  const CudaProbe probe = ProbeCuda();
  const auto version = [](int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); };
  if (probe.driver_missing) return "no NVIDIA driver is installed";
  if (probe.driver_old) {
    return fmt::format("the NVIDIA driver supports CUDA {}; this build requires {}", version(probe.driver_version),
                       version(probe.runtime_version));
  }
  if (probe.error != 0) return fmt::format("CUDA runtime error: {}", probe.error_text);
  if (probe.devices == 0) return "the NVIDIA driver reports no usable GPU";
  if (probe.capability < kMinCapability) {
    return fmt::format("{} has compute capability {}.{}; the kernels require {}.{} or higher", probe.name,
                       probe.capability / 10, probe.capability % 10, kMinCapability / 10, kMinCapability % 10);
  }
  return "";
}

std::string MissingForCuda(int count) {
  if (std::string missing = MissingForCuda(); !missing.empty()) return missing;
  const int devices = ProbeCuda().devices;
  if (devices < count) {
    return fmt::format("{} ranks of this machine need a GPU each, and CUDA lists {} (CUDA_VISIBLE_DEVICES)", count,
                       devices);
  }
  for (int index = 0; index < count; ++index) {
    const CudaProbe probe = ProbeCuda(index);
    if (probe.capability >= kMinCapability) continue;
    return fmt::format(
        "GPU {} of the {} for ranks, {}, has compute capability {}.{}; the kernels require {}.{} or higher "
        "(CUDA_VISIBLE_DEVICES selects others)",
        index, count, probe.name, probe.capability / 10, probe.capability % 10, kMinCapability / 10,
        kMinCapability % 10);
  }
  return "";
}

std::string CudaUnit() {
  if (!MissingForCuda().empty()) return "";
  return UnitOf(ProbeCuda());
}
#else
std::string MissingForCuda() {
  return "this build has no CUDA support (KVANTA_CUDA=OFF, or no GPU or no usable nvcc was found)";
}

std::string MissingForCuda(int /*count*/) {
  return MissingForCuda();
}

std::string CudaUnit() {
  return "";
}

std::shared_ptr<CudaContext> MakeCudaContext(int /*index*/) {
  throw ResourceError(MissingForCuda());
}
#endif

}  // namespace kvanta::kernels
