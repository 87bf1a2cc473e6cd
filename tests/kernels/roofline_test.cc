// The roofline loops of every unit that this machine runs do the operations that they report.
#include <gtest/gtest.h>

#include <vector>

#include "bench/roofline_table.h"
#include "kernels/cpu/select.h"
#include "kernels/ops.h"

namespace kvanta::kernels {
namespace {

class RooflineTest : public ::testing::TestWithParam<const char*> {};

TEST_P(RooflineTest, LoopsDoWhatTheyReport) {
  const RooflineTable& loops = RooflineOf(SelectIsa(GetParam()));
  double operations = 0;
  const float sums = loops.bf16_dot(3, &operations);  // adds zeros
  EXPECT_GT(operations, 0);
  EXPECT_EQ(loops.bf16_dot(7, &operations), sums);
  const float integer_sums = loops.wide_dot(3, &operations);
  EXPECT_EQ(loops.wide_dot(7, &operations), integer_sums);
  EXPECT_EQ(loops.subbyte_dot(7, &operations), integer_sums);  // the same initial sums
  for (const auto dot : {loops.int8_dot, loops.int4_dot}) {    // ones by ones
    const float products = dot(7, &operations);
    EXPECT_EQ(products, static_cast<float>(operations / 2));
  }
  const float fixed_point = loops.f32_fma(60, &operations);  // every sum ends at 2
  EXPECT_EQ(fixed_point, static_cast<float>(operations / 60));
  if (loops.fp16_fma != nullptr) {
    const float in_fp16 = loops.fp16_fma(60, &operations);
    EXPECT_EQ(in_fp16, static_cast<float>(operations / 60));
  }
  std::vector<float> data(4096, 1.0F);
  for (const int streams : {1, 2, 4, 8}) {
    data[4096 / streams * (streams - 1) + 3] = static_cast<float>(streams + 1);  // in the last stream
    EXPECT_EQ(loops.read(data.data(), 4 * 4096, streams, 512), static_cast<float>(streams + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Units, RooflineTest, ::testing::ValuesIn(RunnableIsas().begin(), RunnableIsas().end()),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace kvanta::kernels
