// This machine's GPUs; only in builds with CUDA (KVANTA_HAS_CUDA).
#pragma once

namespace kvanta::kernels {

struct CudaProbe {
  int error = 0;            // runtime error code, 0: none
  bool driver_old = false;  // older than the runtime requires
  bool driver_missing = false;
  const char* error_text = "";
  int devices = 0;
  int best = -1;           // device of the highest compute capability
  int capability = 0;      // times 10
  char name[256] = "";     // name of device `best`
  int driver_version = 0;  // 13000 for 13.0; 0 without a driver
  int runtime_version = 0;
};

CudaProbe ProbeCuda() noexcept;

}  // namespace kvanta::kernels
