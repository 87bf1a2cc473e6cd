// What the unit that nvcc compiles tells of the machine; there only where the build has one (KVANTA_HAS_CUDA).
#pragma once

namespace kvanta::kernels {

struct CudaProbe {
  int error = 0;            // of the runtime; 0: none
  bool driver_old = false;  // the driver is older than the runtime
  bool driver_missing = false;
  const char* error_text = "";
  int devices = 0;
  int best = -1;           // the device of the highest capability
  int capability = 0;      // its compute capability, times 10
  char name[256] = "";     // of that device
  int driver_version = 0;  // 13000 for 13.0; 0 without a driver
  int runtime_version = 0;
};

CudaProbe ProbeCuda() noexcept;

}  // namespace kvanta::kernels
