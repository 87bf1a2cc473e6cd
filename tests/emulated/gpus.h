// GPUs that a test runs on: an emulated one, and this machine's, if it has one.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "emulated/cuda_gpu.h"
#include "kernels/cuda/cuda_context.h"

namespace kvanta::testing {

inline std::vector<std::string> Gpus() {
  return {"emulated", "cuda"};
}

// Base of tests over Gpus(); skipped on machines without a GPU.
class GpuTestBase : public ::testing::Test {
 protected:
  void Start(const std::string& name) {
    emulated_ = name == "emulated";
    if (emulated_) {
      gpu_ = MakeEmulatedGpu();
    } else if (const std::string missing = kernels::MissingForCuda(); missing.empty()) {
      gpu_ = kernels::MakeCudaContext();
    } else {
      GTEST_SKIP() << missing;
    }
  }
  void TearDown() override {
    if (gpu_ != nullptr) gpu_->device().Synchronize();
  }

  template <class T>
  Buffer Upload(const std::vector<T>& values) {
    Buffer buffer = gpu_->device().Allocate(values.size() * sizeof(T));
    gpu_->device().CopyIn(buffer.data(), values.data(), values.size() * sizeof(T));
    return buffer;
  }
  template <class T = float>
  std::vector<T> Download(const Buffer& buffer) {
    std::vector<T> values(buffer.bytes() / sizeof(T));
    gpu_->device().CopyOut(values.data(), buffer.data(), buffer.bytes());
    gpu_->device().Synchronize();
    return values;
  }

  std::shared_ptr<kernels::CudaContext> gpu_;
  bool emulated_ = false;
};

}  // namespace kvanta::testing
