#include "kernels/cuda/cuda_context.h"

#include <fmt/format.h>

#include "kernels/cuda/probe.h"
#include "kvanta/error.h"

namespace kvanta::kernels {

std::string MissingForRanks(int ranks, const std::function<CudaProbe(int device)>& probe) {
  for (int device = 0; device < ranks; ++device) {
    const CudaProbe gpu = probe(device);
    if (gpu.devices < ranks) {
      return fmt::format("{} ranks of this machine need a GPU each, and CUDA lists {} (CUDA_VISIBLE_DEVICES)", ranks,
                         gpu.devices);
    }
    if (gpu.capability < kMinCapability) {
      return fmt::format(
          "GPU {} of {} for ranks, {}, has compute capability {}.{}; the kernels require {}.{} or higher "
          "(CUDA_VISIBLE_DEVICES selects others)",
          device, ranks, gpu.name, gpu.capability / 10, gpu.capability % 10, kMinCapability / 10, kMinCapability % 10);
    }
  }
  return "";
}

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
  return MissingForRanks(count, ProbeCuda);
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
