// The GPUs that a test can run on: one that is emulated, and this machine's, where it has one.
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

// A test over Gpus(): skipped, with what is missing, where the machine has no GPU.
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
    if (gpu_ != nullptr) gpu_->Check();
  }

  std::shared_ptr<kernels::CudaContext> gpu_;
  bool emulated_ = false;
};

}  // namespace kvanta::testing
