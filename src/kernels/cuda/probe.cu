// ProbeCuda with the CUDA runtime.
#include "kernels/cuda/probe.h"

#include <cuda_runtime_api.h>

#include <cstdio>

namespace kvanta::kernels {

CudaProbe ProbeCuda(int requested) noexcept {
  CudaProbe probe;
  cudaDriverGetVersion(&probe.driver_version);
  cudaRuntimeGetVersion(&probe.runtime_version);
  const cudaError_t error = cudaGetDeviceCount(&probe.devices);
  probe.error = static_cast<int>(error);
  probe.error_text = cudaGetErrorString(error);
  probe.driver_old = error == cudaErrorInsufficientDriver && probe.driver_version > 0;
  probe.driver_missing = error == cudaErrorInsufficientDriver && probe.driver_version == 0;
  if (error == cudaErrorNoDevice) probe.error = 0;
  if (error != cudaSuccess) probe.devices = 0;
  for (int device = 0; device < probe.devices; ++device) {
    if (requested >= 0 && device != requested) continue;
    int major = 0;
    int minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (major * 10 + minor <= probe.capability) continue;
    probe.device = device;
    probe.capability = major * 10 + minor;
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) {
      std::snprintf(probe.name, sizeof(probe.name), "%s", properties.name);
    }
  }
  cudaGetLastError();  // clears the error, which is in `probe`
  return probe;
}

}  // namespace kvanta::kernels
