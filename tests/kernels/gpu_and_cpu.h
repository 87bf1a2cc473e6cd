// Base of tests that compare operations of a GPU with those of a CPU.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/thread_pool.h"
#include "emulated/gpus.h"
#include "kernels/ops.h"

namespace kvanta::testing {

class GpuAndCpuTest : public GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    Start(GetParam());
    if (gpu_ == nullptr) return;
    const auto threads = std::make_shared<ThreadPool>(1);
    ops_ = kernels::MakeGpuOps(gpu_, threads);
    cpu_ = kernels::MakeCpuOps(threads);
  }

  std::unique_ptr<kernels::Ops> ops_, cpu_;
};

}  // namespace kvanta::testing
