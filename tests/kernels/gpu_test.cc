// Detection of this machine's GPUs.
#include "kernels/cuda/cuda_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "kernels/cuda/probe.h"

namespace kvanta::kernels {
namespace {

// Without a usable GPU, MissingForCuda gives the reason in one line.
TEST(GpuTest, MissingForCudaGivesTheReason) {
  const std::string missing = MissingForCuda();
  EXPECT_EQ(missing, MissingForCuda());  // no side effects
  if (missing.empty()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(missing, ::testing::AnyOf(::testing::HasSubstr("no CUDA support"), ::testing::HasSubstr("NVIDIA driver"),
                                        ::testing::HasSubstr("the kernels require"),
                                        ::testing::HasSubstr("CUDA runtime error")));
  EXPECT_EQ(missing.find('\n'), std::string::npos);
}

TEST(GpuTest, RanksNeedAGpuEach) {
  const auto missing = [](int ranks, std::vector<int> capabilities) {
    return MissingForRanks(ranks, [&](int device) {
      CudaProbe probe{.devices = static_cast<int>(capabilities.size())};
      if (device < probe.devices) probe.capability = capabilities[static_cast<size_t>(device)];
      std::snprintf(probe.name, sizeof(probe.name), "Board %d", device);
      return probe;
    });
  };
  EXPECT_EQ(missing(2, {90, 90}), "");
  EXPECT_EQ(missing(2, {80, 90, 70}), "") << "the third is not used";
  EXPECT_EQ(missing(4, {90, 90}), "4 ranks of this machine need a GPU each, and CUDA lists 2 (CUDA_VISIBLE_DEVICES)");
  EXPECT_EQ(missing(2, {90, 75}),
            "GPU 1 of 2 for ranks, Board 1, has compute capability 7.5; the kernels require 8.0 or higher "
            "(CUDA_VISIBLE_DEVICES selects others)");
}

}  // namespace
}  // namespace kvanta::kernels
