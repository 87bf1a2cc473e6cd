// Linear layers with codes and scales apart: comparison with double on the same codes for every unit and format, and
// the same bits for any number of rows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "emulated/units.h"
#include "formats/minifloat.h"
#include "kernels/linear/stacked_linear.h"
#include "kernels/ops.h"
#include "kernels/product.h"
#include "kernels/random_values.h"
#include "kernels/random_weight.h"
#include "kvanta/error.h"
#include "tolerance.h"
#include "weights/quantized_weight.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::DotTolerance;
using kvanta::testing::Unit;
using kvanta::testing::Units;

struct QuantizedCase {
  Unit unit;
  std::string name;
  weights::QuantizedFormat format;
};

class QuantizedLinearTest : public ::testing::TestWithParam<QuantizedCase> {
 protected:
  std::unique_ptr<Ops> MakeOps(int threads = 2) const {
    return MakeCpuOps(std::make_shared<ThreadPool>(threads), *GetParam().unit.table);
  }
  // A format with one scale per row has the group `in`.
  weights::QuantizedFormat Format(int64_t in) const {
    weights::QuantizedFormat format = GetParam().format;
    if (format.group == 0) format.group = in;
    return format;
  }
  // x as the product rounds it: for tiles, to bf16.
  static float Activation(float value) {
    const weights::QuantizedFormat& format = GetParam().format;
    const bool has_tiles = format.codes != weights::CodeType::kNf4 && format.scales != weights::GroupScale::kE4M3;
    return has_tiles && GetParam().unit.name.starts_with("amx") ? Bf16ToFloat(FloatToBf16(value)) : value;
  }
  static std::unique_ptr<Linear> Make(Ops& ops, const weights::QuantizedWeight& weight,
                                      std::span<const float> bias = {}) {
    const weights::QuantizedView view{&weight};
    return ops.MakeQuantizedLinear({&view, 1}, bias);
  }
  // The guard y[out..y_stride) of each row detects writes beyond a row.
  void ExpectOracle(int64_t out, int64_t in, int64_t rows, bool shuffled = false) const {
    SCOPED_TRACE(::testing::Message() << "out " << out << " in " << in << " rows " << rows);
    const RandomWeight w(out, in, Format(in), 1, shuffled);
    const auto x = RandomValues(rows * in, 2);
    std::vector<float> activations = x;
    for (float& value : activations) value = Activation(value);
    const auto bias = RandomValues(out, 3);
    const auto ops = MakeOps();
    const auto linear = Make(*ops, w, bias);
    ASSERT_NE(linear, nullptr);
    const int64_t y_stride = out + 5;
    const auto y = Product(*linear, x, rows, y_stride);
    std::vector<float> values(static_cast<size_t>(in)), dequantized(values.size());
    for (int64_t column = 0; column < out; ++column) {
      w.DequantizeRow(column, values.data());
      linear->DequantizeRow(column, dequantized.data());
      ASSERT_EQ(dequantized, values) << column;
      for (int64_t row = 0; row < rows; ++row) {
        if (!IsCompared(row, rows)) continue;
        const float* activation = &activations[row * in];
        double sum = bias[column];
        double magnitude = std::abs(sum);
        for (int64_t k = 0; k < in; ++k) {
          const double term = double{activation[k]} * values[k];
          sum += term;
          // A zero point is subtracted exactly, but rows round the product with the scale.
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(y[row * y_stride + column], sum, DotTolerance(2 * in + 8, magnitude)) << row << ", " << column;
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = out; column < y_stride; ++column) ASSERT_EQ(y[row * y_stride + column], -77.0F);
    }
  }
};

TEST_P(QuantizedLinearTest, MatchesTheOracleForAnyShape) {
#ifdef KVANTA_SANITIZED  // many times slower: edges of blocks alone
  const std::vector<int64_t> sizes = {1, 31, 128, 577};
#else
  const std::vector<int64_t> sizes = {1, 2, 16, 31, 64, 127, 128, 129, 320, 577};
#endif
  for (const int64_t in : sizes) {
    for (const int64_t out : {1, 16, 17, 50}) {
      for (const int64_t rows : {1, 2, 7, 13}) ExpectOracle(out, in, rows);
    }
  }
  ExpectOracle(40, 1200, 130);  // several blocks of rows and of steps
}

TEST_P(QuantizedLinearTest, OrderOfColumnsIsUndone) {
  ExpectOracle(20, 288, 5, true);
  ExpectOracle(20, 100, 121, true);
}

TEST_P(QuantizedLinearTest, RowsAreBatchInvariant) {
  const int64_t in = 611, out = 210;
  const RandomWeight w(out, in, Format(in), 4);
  const auto x = RandomValues(200 * in, 5), bias = RandomValues(out, 6);
  const auto ops = MakeOps(1), threads = MakeOps(3);
  const auto linear = Make(*ops, w, bias), in_parallel = Make(*threads, w, bias);
  std::vector<float> expected(static_cast<size_t>(200 * out));
  for (int64_t row = 0; row < 200; ++row) {
    linear->Forward(x.data() + row * in, 1, expected.data() + row * out, out);
  }
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 64, 121, 200}) {
    for (const Linear* each : {linear.get(), in_parallel.get()}) {
      const auto y = Product(*each, x, rows, out);
      ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0) << rows << " rows";
    }
  }
}

// One column for each code: a decoder that is wrong for a single one, a subnormal say, fails.
TEST_P(QuantizedLinearTest, EveryCodeIsDecodedExactly) {
  RandomWeight w(256, 2, Format(2), 7);
  for (int64_t row = 0; row < 256; ++row) {
    const bool is_nan = GetParam().format.codes == weights::CodeType::kE4M3 && (row & 0x7f) == 0x7f;
    const bool is_byte =
        GetParam().format.codes == weights::CodeType::kE4M3 || GetParam().format.codes == weights::CodeType::kInt8;
    w.codes_[2 * row] = static_cast<uint8_t>(is_nan ? 0 : is_byte ? row : row & 15);
    w.codes_[2 * row + 1] = w.codes_[2 * (255 - row)];
    w.scales_[row] = 0.5F;
    w.scale_codes_[row] = GetParam().format.scales == weights::GroupScale::kE8M0 ? 126 : 0x30;  // 0.5
    w.tensor_scale_ = 1;
  }
  const auto ops = MakeOps();
  const auto linear = Make(*ops, w);
  for (const int64_t k : {0, 1}) {
    const auto y = Product(*linear, {k == 0 ? 1.0F : 0.0F, k == 0 ? 0.0F : 1.0F}, 1, 256);
    for (int64_t row = 0; row < 256; ++row) {
      float values[2];
      w.DequantizeRow(row, values);
      ASSERT_EQ(y[row], values[k]) << row;
    }
  }
}

TEST_P(QuantizedLinearTest, WeightsOfAStackKeepTheirOwnScales) {
  const int64_t in = 256;
  RandomWeight a(20, in, Format(in), 8), b(13, in, Format(in), 9);
  b.tensor_scale_ = 5;
  const auto x = RandomValues(3 * in, 10), bias = RandomValues(33, 11);
  const auto ops = MakeOps();
  const weights::QuantizedView views[] = {{&a}, {&b}};
  const auto both = ops->MakeQuantizedLinear(views, bias);
  ASSERT_NE(both, nullptr);
  const auto y = Product(*both, x, 3, 33);
  const auto first = Product(*Make(*ops, a, {bias.data(), 20}), x, 3, 20);
  const auto second = Product(*Make(*ops, b, {bias.data() + 20, 13}), x, 3, 13);
  for (int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(std::memcmp(&y[row * 33], &first[row * 20], 20 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(&y[row * 33 + 20], &second[row * 13], 13 * sizeof(float)), 0);
  }
}

TEST_P(QuantizedLinearTest, TakesTheBytesThatAPlanCounts) {
  const RandomWeight w(40, 300, Format(300), 12);
  const auto ops = MakeOps();
  EXPECT_EQ(Make(*ops, w)->WeightBytes(), 3 * 3 * weights::QuantizedStepBytes(Format(300), 300));
}

// Every format that kernels read, and groups that others divide: a row, 64 weights.
std::vector<std::pair<std::string, weights::QuantizedFormat>> TestedFormats() {
  using weights::CodeType, weights::GroupScale;
  std::vector<std::pair<std::string, weights::QuantizedFormat>> formats = {
      {"e4m3_row", {CodeType::kE4M3, GroupScale::kF32, 0}},
      {"int8_row", {CodeType::kInt8, GroupScale::kF32, 0}},
      {"int4_row", {CodeType::kInt4, GroupScale::kF32, 0}},
      {"int4_64", {CodeType::kInt4, GroupScale::kF32, 64}},
  };
  for (const weights::KernelFormat& format : weights::kKernelFormats) {
    std::string name(format.name);
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    if (!name.starts_with("nf") && format.scales == GroupScale::kF32) name += "_" + std::to_string(format.group);
    formats.push_back({name, {format.codes, format.scales, format.group}});
  }
  return formats;
}

std::vector<QuantizedCase> QuantizedCases() {
  const auto formats = TestedFormats();
  std::vector<QuantizedCase> cases;
  for (const Unit& unit : Units()) {
    for (const auto& [name, format] : formats) cases.push_back({unit, unit.name + "_" + name, format});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Units, QuantizedLinearTest, ::testing::ValuesIn(QuantizedCases()),
                         [](const auto& tested) { return tested.param.name; });

TEST(QuantizedLinear, IsNotMadeForOtherGroupsNorForDifferentFormats) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  const auto make = [&](const RandomWeight& a, const RandomWeight& b) {
    const weights::QuantizedView views[] = {{&a}, {&b}};
    return ops->MakeQuantizedLinear(views, {});
  };
  const RandomWeight rows(4, 256, {weights::CodeType::kInt4, weights::GroupScale::kF32, 128}, 1);
  const RandomWeight groups_of_24(4, 240, {weights::CodeType::kInt4, weights::GroupScale::kF32, 24}, 1);
  const RandomWeight groups_of_32(4, 256, {weights::CodeType::kInt4, weights::GroupScale::kF32, 32}, 1);
  const RandomWeight shuffled(4, 256, {weights::CodeType::kInt4, weights::GroupScale::kF32, 128}, 1, true);
  EXPECT_NE(make(rows, rows), nullptr);
  EXPECT_EQ(make(groups_of_24, groups_of_24), nullptr);
  EXPECT_EQ(make(rows, groups_of_32), nullptr);
  EXPECT_EQ(make(rows, shuffled), nullptr);
}

TEST(QuantizedLinear, RejectsScalesBeyondFloat32) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  RandomWeight w(4, 128, {weights::CodeType::kE4M3, weights::GroupScale::kF32, 128}, 1);
  w.scales_[2] = 3e38F;
  const weights::QuantizedView view{&w};
  EXPECT_THROW(ops->MakeQuantizedLinear({&view, 1}, {}), InputError);
}

TEST(QuantizedLinear, RejectsPowersOfTwoThatTheFactorOfE4M3CodesLeavesInfinite) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  RandomWeight w(4, 128, {weights::CodeType::kE4M3, weights::GroupScale::kE8M0, 32}, 1);
  const weights::QuantizedView view{&w};
  w.scale_codes_[2] = 246;
  EXPECT_NE(ops->MakeQuantizedLinear({&view, 1}, {}), nullptr);
  w.scale_codes_[2] = 247;
  EXPECT_THROW(ops->MakeQuantizedLinear({&view, 1}, {}), InputError);
}

TEST(StackedLinear, PutsOutputsSideBySide) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(2));
  const int64_t in = 96, rows = 4;
  const auto f32 = RandomValues(10 * in, 1);
  const RandomWeight int4(7, in, {weights::CodeType::kInt4, weights::GroupScale::kF32, 32}, 2);
  const weights::WeightView view{f32.data(), DType::kF32, 10, in};
  const weights::QuantizedView quantized{&int4};
  std::vector<std::unique_ptr<Linear>> parts;
  parts.push_back(ops->MakeLinear({&view, 1}, {}, WeightType::kF32));
  parts.push_back(ops->MakeQuantizedLinear({&quantized, 1}, {}));
  const auto x = RandomValues(rows * in, 3);
  const auto first = Product(*parts[0], x, rows, 10), second = Product(*parts[1], x, rows, 7);
  const int64_t bytes = parts[0]->WeightBytes() + parts[1]->WeightBytes();
  const auto stacked = MakeStackedLinear(std::move(parts));
  EXPECT_EQ(stacked->Out(), 17);
  EXPECT_EQ(stacked->In(), in);
  EXPECT_EQ(stacked->WeightBytes(), bytes);
  std::vector<float> y(static_cast<size_t>(rows * 20), -77.0F), row_of_w(in), expected(in);
  std::vector<RowArgmax> argmaxes(rows);
  stacked->Forward(x.data(), rows, y.data(), 20, argmaxes.data());
  for (int64_t row = 0; row < rows; ++row) {
    EXPECT_EQ(std::memcmp(&y[row * 20], &first[row * 10], 10 * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(&y[row * 20 + 10], &second[row * 7], 7 * sizeof(float)), 0);
    EXPECT_EQ(y[row * 20 + 17], -77.0F);
    const auto* largest = std::max_element(&y[row * 20], &y[row * 20 + 17]);
    EXPECT_EQ(argmaxes[row].column, largest - &y[row * 20]);
    EXPECT_TRUE(argmaxes[row].finite);
  }
  stacked->DequantizeRow(12, row_of_w.data());
  int4.DequantizeRow(2, expected.data());
  EXPECT_EQ(row_of_w, expected);
}

}  // namespace
}  // namespace kvanta::kernels
