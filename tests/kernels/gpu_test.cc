// Detection of this machine's GPUs.
#include "kernels/cuda/cuda_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

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

}  // namespace
}  // namespace kvanta::kernels
