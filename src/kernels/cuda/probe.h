// This machine's GPUs.
#pragma once

#include <functional>
#include <string>

namespace kvanta::kernels {

struct CudaProbe {
  int error = 0;            // runtime error code, 0: none
  bool driver_old = false;  // older than the runtime requires
  bool driver_missing = false;
  const char* error_text = "";
  int devices = 0;
  int device = -1;         // the requested one, or that of the highest compute capability
  int capability = 0;      // its compute capability, times 10
  char name[256] = "";     // its name
  int driver_version = 0;  // 13000 for 13.0; 0 without a driver
  int runtime_version = 0;
};

// Only in builds with CUDA (KVANTA_HAS_CUDA). `device`: -1 for the best one.
CudaProbe ProbeCuda(int device = -1) noexcept;

// Reason for which the first `ranks` GPUs cannot serve a rank each; "" if they can. probe: ProbeCuda.
std::string MissingForRanks(int ranks, const std::function<CudaProbe(int device)>& probe);

// Name of the compiled architecture that runs on it.
inline const char* UnitOf(const CudaProbe& probe) noexcept {
  return probe.capability >= 90 ? "sm90" : "sm80";
}

}  // namespace kvanta::kernels
