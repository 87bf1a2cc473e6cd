// Linear layers of every unit: comparison with a double-precision oracle on the same stored values, and batch
// invariance.
#include "kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "emulated/units.h"
#include "kernels/ops.h"
#include "kernels/product.h"
#include "kernels/random_values.h"
#include "kvanta/error.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::AllUnits;
using kvanta::testing::DotTolerance;
using kvanta::testing::Unit;

// A value after rounding to the storage type.
float Stored(float value, DType storage) {
  if (storage == DType::kBf16) return Bf16ToFloat(FloatToBf16(value));
  return storage == DType::kF16 ? Fp16ToFloat(FloatToFp16(value)) : value;
}

// x as rounded by the product: only for bf16 weights.
float Activation(float value, DType storage) {
  return storage == DType::kBf16 ? Stored(value, storage) : value;
}

struct Case {
  Unit unit;
  WeightType storage;
};

// Properties of every storage of W.
class LinearTest : public ::testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Ops> MakeOps(int threads) const {
    return MakeCpuOps(std::make_shared<ThreadPool>(threads), *GetParam().unit.table);
  }
  std::unique_ptr<Linear> MakeLinear(Ops& ops, const std::vector<float>& w, int64_t out, int64_t in,
                                     const std::vector<float>& bias = {}) const {
    const weights::WeightView view{w.data(), DType::kF32, out, in};
    return ops.MakeLinear({&view, 1}, bias, GetParam().storage);
  }
};

// W stored as elements; block_linear_test.cc tests blocks.
class ElementLinearTest : public LinearTest {
 protected:
  DType StoredAs() const {
    if (GetParam().storage == WeightType::kF32) return DType::kF32;
    return GetParam().storage == WeightType::kBf16 ? DType::kBf16 : DType::kF16;
  }
  // The guard y[out..y_stride) of each row detects writes beyond a row.
  void ExpectOracle(int64_t out, int64_t in, int64_t rows) const {
    SCOPED_TRACE(::testing::Message() << "out " << out << " in " << in << " rows " << rows);
    const DType storage = StoredAs();
    const auto w = RandomValues(out * in, 1);
    const auto x = RandomValues(rows * in, 2);
    const auto bias = RandomValues(out, 3);
    const auto ops = MakeOps(2);
    const int64_t y_stride = out + 5;
    const auto y = Product(*MakeLinear(*ops, w, out, in, bias), x, rows, y_stride);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < out && IsCompared(row, rows); ++column) {
        double sum = bias[column];
        double magnitude = std::abs(sum);
        for (int64_t k = 0; k < in; ++k) {
          const double term = double{Activation(x[row * in + k], storage)} * Stored(w[column * in + k], storage);
          sum += term;
          magnitude += std::abs(term);
        }
        ASSERT_NEAR(y[row * y_stride + column], sum, DotTolerance(in, magnitude))
            << "row " << row << " column " << column;
      }
      for (int64_t column = out; column < y_stride; ++column) ASSERT_EQ(y[row * y_stride + column], -77.0F);
    }
  }
};

TEST_P(ElementLinearTest, MatchesTheOracleForAnyShape) {
  for (const int64_t in : {1, 2, 3, 15, 16, 33, 64, 577}) {
    for (const int64_t out : {1, 7, 16, 17, 50, 130}) {
      for (const int64_t rows : {1, 3, 13}) ExpectOracle(out, in, rows);
    }
  }
}

TEST_P(ElementLinearTest, MatchesTheOracleOverSeveralBlocksOfRowsAndSteps) {
  ExpectOracle(40, 1200, 2);   // five blocks of f32 steps
  ExpectOracle(40, 1200, 26);  // sums carried from block to block
  ExpectOracle(33, 70, 300);   // two or three blocks of rows
  ExpectOracle(40, 4500, 45);  // as many blocks of steps where a step is 32 k
}

TEST_P(LinearTest, RowsAreBatchInvariant) {
  const int64_t in = 611;
  const int64_t out = 210;
  const auto w = RandomValues(out * in, 4);
  const auto x = RandomValues(200 * in, 5);
  const auto bias = RandomValues(out, 6);
  const auto ops = MakeOps(1);
  const auto linear = MakeLinear(*ops, w, out, in, bias);
  std::vector<float> expected(static_cast<size_t>(200 * out));
  for (int64_t row = 0; row < 200; ++row) {
    linear->Forward(x.data() + row * in, 1, expected.data() + row * out, out);
  }
  for (const int64_t rows : {2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 17, 19, 21, 23, 24, 25, 26, 64, 121, 199, 200}) {
    const auto y = Product(*linear, x, rows, out);
    ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0) << rows << " rows";
  }
}

// Values of very different magnitudes, and subnormal ones, for which different numbers of rows take different code
// paths.
TEST_P(ElementLinearTest, RowsAreBatchInvariantForExtremeValues) {
  const int64_t in = 200, out = 40, max_rows = 40;
  std::mt19937 generator(7);
  const auto values = [&](int64_t n) {
    std::vector<float> x(static_cast<size_t>(n));
    for (float& value : x) {
      value = std::ldexp(static_cast<float>(generator() % 2001) / 1000 - 1, static_cast<int>(generator() % 90) - 75);
    }
    return x;
  };
  const auto w = values(out * in);
  auto x = values(max_rows * in);
  std::fill_n(x.begin(), in, 0.0F);  // a row whose result is the bias
  std::vector<float> bias = values(out);
  for (float& value : bias) value *= 0x1p-75F;  // subnormal, or little more
  const auto ops = MakeOps(1);
  const auto linear = MakeLinear(*ops, w, out, in, bias);
  std::vector<float> expected(static_cast<size_t>(max_rows * out));
  for (int64_t row = 0; row < max_rows; ++row) {
    linear->Forward(x.data() + row * in, 1, expected.data() + row * out, out);
  }
  for (const int64_t rows : {2, 3, 4, 5, 16, 17, 32, 40}) {
    const auto y = Product(*linear, x, rows, out);
    ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0) << rows << " rows";
  }
}

// Equal columns give equal values: the argmax is the first of them.
TEST_P(LinearTest, ArgmaxIsTheFirstMaximumOfEveryRow) {
  const int64_t in = 64, rows = 130;
  for (const int64_t out : {1, 15, 16, 1003}) {
    SCOPED_TRACE(out);
    auto w = RandomValues(out * in, 11);
    for (int64_t column = 1; column < out; column += 2) {
      std::copy_n(w.begin() + (column - 1) * in, in, w.begin() + column * in);
    }
    auto x = RandomValues(rows * in, 12);
    x[5 * in] = std::nanf("");
    const auto ops = MakeOps(2);
    std::vector<float> y(static_cast<size_t>(rows * out));
    std::vector<RowArgmax> argmaxes(static_cast<size_t>(rows));
    const auto linear = MakeLinear(*ops, w, out, in);
    linear->Forward(x.data(), rows, y.data(), out, argmaxes.data());
    EXPECT_EQ(std::memcmp(y.data(), Product(*linear, x, rows, out).data(), y.size() * sizeof(float)), 0);
    for (int64_t row = 0; row < rows; ++row) {
      const float* values = y.data() + row * out;
      const bool finite = std::all_of(values, values + out, [](float value) { return std::isfinite(value); });
      ASSERT_EQ(argmaxes[static_cast<size_t>(row)].finite, finite) << row;
      if (!finite) continue;
      const float* largest = std::max_element(values, values + out);
      EXPECT_EQ(argmaxes[static_cast<size_t>(row)].value, *largest) << row;
      EXPECT_EQ(argmaxes[static_cast<size_t>(row)].column, largest - values) << row;
    }
  }
}

TEST_P(LinearTest, BitsDoNotDependOnThreadCount) {
  const int64_t in = 300;
  const int64_t out = 1000;  // enough work for many tasks
  const auto w = RandomValues(out * in, 7);
  const auto x = RandomValues(64 * in, 8);
  for (const int64_t rows : {1, 5, 64}) {
    std::vector<float> expected;
    for (const int threads : {1, 2, 4}) {
      const auto ops = MakeOps(threads);
      const auto y = Product(*MakeLinear(*ops, w, out, in), x, rows, out);
      if (threads == 1) expected = y;
      ASSERT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0) << threads << " threads";
    }
  }
}

TEST_P(ElementLinearTest, StacksWeightsOfEveryTypeAndDequantizesRows) {
  const int64_t in = 21;
  const auto values = RandomValues(3 * 18 * in, 9);
  std::vector<uint16_t> bf16, f16;
  std::vector<float> f32(values.begin(), values.begin() + 18 * in);
  for (int64_t i = 0; i < 18 * in; ++i) bf16.push_back(FloatToBf16(values[18 * in + i]));
  for (int64_t i = 0; i < 18 * in; ++i) f16.push_back(FloatToFp16(values[36 * in + i]));
  const weights::WeightView views[] = {
      {f32.data(), DType::kF32, 18, in}, {bf16.data(), DType::kBf16, 18, in}, {f16.data(), DType::kF16, 18, in}};
  const auto ops = MakeOps(2);
  const auto linear = ops->MakeLinear(views, {}, GetParam().storage);
  EXPECT_EQ(linear->Out(), 54);
  EXPECT_EQ(linear->In(), in);
  std::vector<float> row(in);
  for (int64_t index = 0; index < 54; ++index) {
    linear->DequantizeRow(index, row.data());
    for (int64_t k = 0; k < in; ++k) {
      float expected = values[index * in + k];
      if (index >= 36)
        expected = Stored(expected, DType::kF16);
      else if (index >= 18)
        expected = Stored(expected, DType::kBf16);
      ASSERT_EQ(row[k], Stored(expected, StoredAs())) << index << ", " << k;
    }
  }
}

TEST_P(ElementLinearTest, NanAndInfinityPropagate) {
  std::vector<float> w(20 * 3, 1.0F);
  w[3] = std::numeric_limits<float>::quiet_NaN();
  w[6] = std::numeric_limits<float>::infinity();
  const auto ops = MakeOps(1);
  const auto y = Product(*MakeLinear(*ops, w, 20, 3), {1, 2, 4}, 1, 20);
  EXPECT_EQ(y[0], 7.0F);
  EXPECT_TRUE(std::isnan(y[1]));
  EXPECT_EQ(y[2], std::numeric_limits<float>::infinity());
  EXPECT_EQ(y[19], 7.0F);
}

std::vector<Case> Cases(std::initializer_list<WeightType> stores) {
  std::vector<Case> cases;
  for (const Unit& unit : AllUnits()) {
    for (const WeightType storage : stores) cases.push_back({unit, storage});
  }
  return cases;
}

std::string CaseName(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8", "int4"};
  return info.param.unit.name + "_" + kNames[static_cast<int>(info.param.storage)];
}

constexpr auto kElements = {WeightType::kBf16, WeightType::kF32, WeightType::kF16};
INSTANTIATE_TEST_SUITE_P(Units, ElementLinearTest, ::testing::ValuesIn(Cases(kElements)), CaseName);
constexpr auto kAll = {WeightType::kBf16, WeightType::kF32, WeightType::kF16, WeightType::kInt8, WeightType::kInt4};
INSTANTIATE_TEST_SUITE_P(Units, LinearTest, ::testing::ValuesIn(Cases(kAll)), CaseName);

TEST(LinearUnits, Bf16IsBitIdenticalOnUnitsWithoutABf16Dot) {
  const auto w = RandomValues(70 * 333, 10);
  const auto x = RandomValues(9 * 333, 11);
  const weights::WeightView view{w.data(), DType::kF32, 70, 333};
  std::vector<float> expected;
  for (const char* isa : RunnableIsas()) {
    const std::string_view unit = isa;
    if (unit == "zen4" || unit == "amx" || unit == "i8mm") continue;  // they sum pairs in another order
    const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1), isa);
    const auto y = Product(*ops->MakeLinear({&view, 1}, {}, WeightType::kBf16), x, 9, 70);
    if (expected.empty()) expected = y;
    EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)), 0) << isa;
  }
}

TEST(LinearErrors, NameTheShape) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  const std::vector<float> w(12, 1e6F);
  const std::vector<float> bias(3);
  const weights::WeightView views[] = {{w.data(), DType::kF32, 2, 3}, {w.data(), DType::kF32, 3, 2}};
  EXPECT_THROW(ops->MakeLinear({}, {}, WeightType::kF32), InputError);
  EXPECT_THROW(ops->MakeLinear(views, {}, WeightType::kF32), InputError);
  EXPECT_THROW(ops->MakeLinear({views, 1}, bias, WeightType::kF32), InputError);
  EXPECT_THROW(ops->MakeLinear({views, 1}, {}, WeightType::kF16), InputError);  // 1e6 does not fit
}

}  // namespace
}  // namespace kvanta::kernels
