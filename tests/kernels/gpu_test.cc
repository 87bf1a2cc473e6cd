// What the library says of the machine's GPUs.
#include "kernels/cuda/cuda_context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace kvanta::kernels {
namespace {

// A GPU that there is needs no words; one that is not there, or cannot be used, says why in one line.
TEST(GpuTest, SaysWhatIsMissing) {
  const std::string missing = MissingForCuda();
  EXPECT_EQ(missing, MissingForCuda());  // asking changes nothing
  if (missing.empty()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_THAT(missing, ::testing::AnyOf(::testing::HasSubstr("this build is without CUDA"),
                                        ::testing::HasSubstr("NVIDIA driver"), ::testing::HasSubstr("the kernels need"),
                                        ::testing::HasSubstr("the CUDA runtime says")));
  EXPECT_EQ(missing.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace kvanta::kernels
