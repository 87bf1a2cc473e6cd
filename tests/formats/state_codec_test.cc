// Codecs of recurrent states: what is stored is what the run continues with, errors, sizes.
#include "formats/state_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "base/dtype.h"
#include "error_of.h"

namespace kvanta::formats {
namespace {

constexpr StateCode kCodes[] = {StateCode::kBf16, StateCode::kInt8, StateCode::kInt4};
constexpr StateShape kShapes[] = {{3, 128, 128, 40}, {2, 64, 24, 7}, {1, 40, 72, 0}, {5, 24, 2, 3}, {0, 0, 0, 9}};

std::vector<float> RandomState(const StateShape& shape, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> state(static_cast<size_t>(shape.Floats()));
  for (float& value : state) value = normal(generator);
  return state;
}

// Rounds `state` and returns its code.
std::vector<uint8_t> Round(StateCode code, const StateShape& shape, std::vector<float>& state) {
  std::vector<uint8_t> coded(static_cast<size_t>(CodedStateBytes(code, shape)), 0xFF);
  for (int64_t part = 0; part < StateParts(shape); ++part) {
    RoundStatePart(code, shape, part, state.data(), coded.data());
  }
  return coded;
}

std::vector<float> Decode(StateCode code, const StateShape& shape, const std::vector<uint8_t>& coded) {
  std::vector<float> state(static_cast<size_t>(shape.Floats()), -1.0F);
  for (int64_t part = 0; part < StateParts(shape); ++part) {
    DecodeStatePart(code, shape, part, coded.data(), state.data());
  }
  return state;
}

// Root of the mean square of the error, as a part of the values'.
double RelativeError(const std::vector<float>& exact, const std::vector<float>& rounded) {
  double error = 0, size = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error += std::pow(double{exact[i]} - rounded[i], 2);
    size += std::pow(double{exact[i]}, 2);
  }
  return std::sqrt(error / size);
}

TEST(StateCodec, DecodesWhatTheRunContinuesWith) {
  for (const StateCode code : kCodes) {
    for (const StateShape& shape : kShapes) {
      std::vector<float> state = RandomState(shape, 1), unstored = state;
      const std::vector<uint8_t> coded = Round(code, shape, state);
      EXPECT_EQ(Decode(code, shape, coded), state) << Name(code) << " " << shape.rows << " x " << shape.columns;
      for (int64_t part = 0; part < StateParts(shape); ++part) {
        RoundStatePart(code, shape, part, unstored.data(), nullptr);
      }
      EXPECT_EQ(unstored, state) << "without a record for the code";
    }
  }
}

// A normal column of 128 values, transformed, has a maximum of about 2.8 deviations: a step of that / 127 or / 7 is an
// error of its 1 / sqrt(12), .0064 and .117; bf16 rounds to 2^-9 of a value at most.
TEST(StateCodec, ErrorsAreThoseOfTheStep) {
  const StateShape shape{4, 128, 64, 0};
  for (const auto& [code, low, high] :
       {std::tuple{StateCode::kBf16, 5e-4, 2e-3}, {StateCode::kInt8, 4e-3, 8e-3}, {StateCode::kInt4, .08, .14}}) {
    const std::vector<float> exact = RandomState(shape, 2);
    std::vector<float> rounded = exact;
    Round(code, shape, rounded);
    EXPECT_GT(RelativeError(exact, rounded), low) << Name(code);
    EXPECT_LT(RelativeError(exact, rounded), high) << Name(code);
  }
}

// One large value among small ones would take all steps of its column without the transform.
TEST(StateCodec, SpreadsOutliers) {
  const StateShape shape{1, 128, 16, 0};
  std::vector<float> exact = RandomState(shape, 3), rounded;
  for (int64_t column = 0; column < 16; ++column) exact[static_cast<size_t>(5 * 16 + column)] = 100;
  rounded = exact;
  Round(StateCode::kInt8, shape, rounded);
  double error = 0;
  for (size_t i = 0; i < exact.size(); ++i) error += std::pow(double{exact[i]} - rounded[i], 2);
  EXPECT_LT(std::sqrt(error / static_cast<double>(exact.size())), 0.06) << "100 / 127 / sqrt(12) is .23";
}

TEST(StateCodec, SizesAreLessThanAQuarter) {
  const StateShape qwen{32, 128, 128, 3 * 8192};
  EXPECT_GE(static_cast<double>(qwen.Bytes()) / static_cast<double>(CodedStateBytes(StateCode::kInt8, qwen)), 3.8);
  EXPECT_GE(static_cast<double>(qwen.Bytes()) / static_cast<double>(CodedStateBytes(StateCode::kInt4, qwen)), 6.5);
  EXPECT_EQ(CodedStateBytes(StateCode::kBf16, qwen) * 2, qwen.Bytes());
  EXPECT_EQ(CodedStateBytes(StateCode::kFloat32, qwen), qwen.Bytes());
}

TEST(StateCodec, ZerosAndTinyValuesAndNaN) {
  const StateShape shape{1, 64, 16, 2};
  for (const StateCode code : kCodes) {
    std::vector<float> zeros(static_cast<size_t>(shape.Floats()));
    const std::vector<uint8_t> coded = Round(code, shape, zeros);
    EXPECT_THAT(zeros, ::testing::Each(0.0F));
    EXPECT_THAT(Decode(code, shape, coded), ::testing::Each(0.0F));
    std::vector<float> tiny(zeros.size(), 1e-42F);
    EXPECT_EQ(Decode(code, shape, Round(code, shape, tiny)), tiny);
    for (const float value : tiny) EXPECT_LT(std::abs(value), 1e-38F);
    std::vector<float> bad = RandomState(shape, 4);
    bad[20] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> decoded = Decode(code, shape, Round(code, shape, bad));
    EXPECT_TRUE(std::isnan(bad[20]) && std::isnan(decoded[20])) << "a fault is not hidden";
  }
}

TEST(StateCodec, NamesAreListed) {
  EXPECT_EQ(ParseStateCode("int8"), StateCode::kInt8);
  EXPECT_THAT(ErrorOf([] { ParseStateCode("int5"); }),
              ::testing::HasSubstr("'int5': expected one of float32, bfloat16, int8, int4"));
}

}  // namespace
}  // namespace kvanta::formats
