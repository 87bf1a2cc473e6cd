#include "base/moving_mean.h"

#include <gtest/gtest.h>

namespace kvanta {
namespace {

TEST(MovingMean, BeginsWithTheFirstValueAndMovesByItsWeight) {
  MovingMean mean(0.25);
  EXPECT_EQ(mean.Value(), 0);
  mean.Add(8);
  EXPECT_EQ(mean.Value(), 8);
  mean.Add(4);
  EXPECT_EQ(mean.Value(), 7);
  mean.Add(7);
  EXPECT_EQ(mean.Value(), 7);
}

}  // namespace
}  // namespace kvanta
