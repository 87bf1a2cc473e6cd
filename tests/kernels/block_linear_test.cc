// Linear layers with weights in blocks: comparison with double on the same codes for every unit, and blocks of a file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "base/math.h"
#include "emulated/units.h"
#include "kernels/block_matrix.h"
#include "kernels/linear/linear.h"
#include "kernels/ops.h"
#include "kernels/product.h"
#include "kernels/random_values.h"
#include "kvanta/error.h"
#include "tolerance.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::BlockDotTolerance;
using kvanta::testing::Unit;
using kvanta::testing::Units;

// Expected codes and scale of a block of x, n <= 32.
struct ActivationBlock {
  float unit = 0;
  int codes[weights::kBlockWeights] = {};
};

ActivationBlock RoundActivations(const float* x, int64_t n, float steps) {
  ActivationBlock block;
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  if (largest == 0) return block;
  const float inverse = steps / largest;
  block.unit = largest / steps;
  for (int64_t i = 0; i < n; ++i) block.codes[i] = static_cast<int>(std::nearbyint(x[i] * inverse));
  return block;
}

struct Expected {
  double value = 0;
  double magnitude = 0;  // sum of the magnitudes of the terms
};

// The blocks of a row.
std::vector<ActivationBlock> RoundRow(const float* x, int64_t in, bool wide) {
  std::vector<ActivationBlock> blocks;
  for (int64_t begin = 0; begin < in; begin += weights::kBlockWeights) {
    blocks.push_back(
        RoundActivations(x + begin, std::min<int64_t>(weights::kBlockWeights, in - begin), wide ? 32512 : 127));
  }
  return blocks;
}

// w: blocks of a row; x: those of a row of activations.
Expected Oracle(const weights::UnpackedBlock* w, int weights, const ActivationBlock* x, int64_t in, double bias) {
  Expected sum{bias, std::abs(bias)};
  for (int64_t begin = 0; begin < in; begin += weights::kBlockWeights) {
    const ActivationBlock& a = x[begin / weights::kBlockWeights];
    const weights::UnpackedBlock& block = w[begin / weights];
    for (int64_t k = begin; k < begin + weights::kBlockWeights; k += weights::kSubBlockWeights) {
      const auto in_block = static_cast<int>(k % weights);
      int dot = 0, total = 0;
      for (int i = 0; i < weights::kSubBlockWeights; ++i) {
        dot += block.codes[in_block + i] * a.codes[k - begin + i];
        total += a.codes[k - begin + i];
      }
      const int sub = in_block / weights::kSubBlockWeights;
      const double product = double{block.scale} * block.sub_scales[sub] * a.unit * dot;
      const double rest = double{block.offset} * block.sub_offsets[sub] * a.unit * total;
      sum.value += product + rest;
      sum.magnitude += std::abs(product) + std::abs(rest);
    }
  }
  return sum;
}

struct BlockCase {
  Unit unit;
  weights::BlockFormat format;

  // `in` rounded up to whole blocks.
  int64_t Whole(int64_t in) const { return RoundUp(in, weights::BlockWeights(format)); }
};

class BlockLinearTest : public ::testing::TestWithParam<BlockCase> {
 protected:
  LinearKind Kind() const { return {WeightType::kStored, wide_}; }

  // Calls test() for activations of 8 bits and of 16.
  template <class Test>
  void ForBothWidths(Test test) {
    for (const bool wide : {false, true}) {
      SCOPED_TRACE(wide ? "wide" : "narrow");
      wide_ = wide;
      test();
    }
  }

  bool wide_ = false;

  std::unique_ptr<Ops> MakeOps() const { return MakeCpuOps(std::make_shared<ThreadPool>(2), *GetParam().unit.table); }

  void ExpectOracle(int64_t out, int64_t in, int64_t rows) const {
    SCOPED_TRACE(::testing::Message() << "out " << out << " in " << in << " rows " << rows);
    const BlockMatrix w = RandomBlocks(out, in, GetParam().format, 1);
    const auto x = RandomValues(rows * in, 2);
    const auto bias = RandomValues(out, 3);
    const auto ops = MakeOps();
    const weights::WeightView view = w.View();
    const auto linear = ops->MakeLinear({&view, 1}, bias, Kind());
    const int64_t y_stride = out + 5;
    const auto y = Product(*linear, x, rows, y_stride);
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<ActivationBlock> activations = RoundRow(&x[row * in], in, wide_);
      for (int64_t column = 0; column < out && IsCompared(row, rows); ++column) {
        const Expected expected = Oracle(&w.blocks[column * w.RowBlocks()], weights::BlockWeights(w.format),
                                         activations.data(), in, bias[column]);
        ASSERT_NEAR(y[row * y_stride + column], expected.value,
                    BlockDotTolerance(in / weights::kSubBlockWeights, expected.magnitude))
            << "row " << row << " column " << column;
      }
      for (int64_t column = out; column < y_stride; ++column) ASSERT_EQ(y[row * y_stride + column], -77.0F);
    }
  }
};

TEST_P(BlockLinearTest, MatchesTheOracleOnTheSameCodes) {
  ForBothWidths([&] {
    const int64_t block = weights::BlockWeights(GetParam().format);
    for (const int64_t in : {block, 2 * block, GetParam().Whole(576)}) {
      for (const int64_t out : {1, 16, 50}) {
        for (const int64_t rows : {1, 2, 3, 13}) ExpectOracle(out, in, rows);
      }
    }
    ExpectOracle(40, GetParam().Whole(2080), 26);  // three blocks of steps, sums carried from one to the next
    ExpectOracle(33, GetParam().Whole(96), 400);   // three blocks of rows
    ExpectOracle(40, GetParam().Whole(2080), 50);  // panels expanded, an odd number of them
  });
}

TEST_P(BlockLinearTest, RowsHaveTheSameBitsInAnyNumber) {
  ForBothWidths([&] {
    const int64_t in = GetParam().Whole(1100), out = 40, rows = 61;
    const BlockMatrix w = RandomBlocks(out, in, GetParam().format, 11);
    const weights::WeightView view = w.View();
    const auto ops = MakeOps();
    const auto linear = ops->MakeLinear({&view, 1}, {}, Kind());
    const auto x = RandomValues(rows * in, 12);
    const auto y = Product(*linear, x, rows, out);
    for (int64_t row = 0; row < rows; ++row) {
      const auto alone = Product(*linear, {x.begin() + row * in, x.begin() + (row + 1) * in}, 1, out);
      ASSERT_EQ(std::memcmp(alone.data(), &y[row * out], out * sizeof(float)), 0) << row;
    }
  });
}

TEST_P(BlockLinearTest, KeepsBlocksOfTheFile) {
  const int64_t in = GetParam().Whole(96);
  const BlockMatrix w = RandomBlocks(37, in, GetParam().format, 4);
  const weights::WeightView view = w.View();
  const auto ops = MakeOps();
  const auto linear = ops->MakeLinear({&view, 1}, {}, Kind());
  std::vector<float> row(static_cast<size_t>(in)), expected(row.size());
  for (int64_t index = 0; index < 37; ++index) {
    linear->DequantizeRow(index, row.data());
    weights::DequantizeBlocks(w.bytes.data() + index * weights::RowBytes(w.format, in), w.format, in, expected.data());
    ASSERT_EQ(row, expected) << index;
  }
  EXPECT_EQ(linear->Kind(), Name(w.format));
  // 48 columns, three panels, in whole steps. K-quants take 8 bits for sub-scales that the file packs in 4 or 6.
  const auto bytes = static_cast<double>(48 * weights::RowBytes(w.format, GetParam().Whole(RoundUp(in, 256))));
  EXPECT_LE(static_cast<double>(linear->WeightBytes()), 1.045 * bytes);
}

// The largest codes of one sign with the largest activations (127, or 32,512 = 127 * 256): sums of 16 or 32 bits must
// not overflow, and all sums are exact in f32.
TEST_P(BlockLinearTest, ExtremeCodesAreExact) {
  ForBothWidths([&] {
    const int64_t in = GetParam().Whole(64);
    for (const int code : {255, 0, 127, 128}) {
      BlockMatrix w{16, in, GetParam().format, {}, {}};
      w.bytes.assign(static_cast<size_t>(16 * weights::RowBytes(w.format, in)), static_cast<uint8_t>(code));
      for (size_t at = 0; at < w.bytes.size(); at += static_cast<size_t>(weights::BlockBytes(w.format))) {
        SetScales(w.format, 1, 0, w.bytes.data() + at);
      }
      w.Unpack();
      const weights::WeightView view = w.View();
      const auto ops = MakeOps();
      const auto linear = ops->MakeLinear({&view, 1}, {}, Kind());
      std::vector<float> values(in);
      linear->DequantizeRow(0, values.data());
      double sum = 0;
      for (const float value : values) sum += value;
      for (const float sign : {1.0F, -1.0F}) {
        const auto y = Product(*linear, std::vector<float>(in, 32512 * sign), 1, 16);
        for (int64_t column = 0; column < 16; ++column) EXPECT_EQ(y[column], 32512 * sign * sum) << column;
      }
    }
  });
}

TEST_P(BlockLinearTest, NonFiniteValuesAffectOnlyTheirRow) {
  ForBothWidths([&] {
    const int64_t in = GetParam().Whole(64);
    const BlockMatrix w = RandomBlocks(20, in, GetParam().format, 5);
    const weights::WeightView view = w.View();
    const auto ops = MakeOps();
    const auto linear = ops->MakeLinear({&view, 1}, {}, Kind());
    auto x = RandomValues(4 * in, 6);
    x[in + 3] = std::numeric_limits<float>::quiet_NaN();
    x[2 * in + 40] = -std::numeric_limits<float>::infinity();
    for (int64_t k = 0; k < in; ++k) x[3 * in + k] = k == 0 ? 1e-38F : 0.0F;
    const auto y = Product(*linear, x, 4, 20);
    for (int64_t column = 0; column < 20; ++column) {
      EXPECT_TRUE(std::isfinite(y[column]));
      EXPECT_TRUE(std::isnan(y[20 + column]));
      EXPECT_TRUE(std::isnan(y[40 + column]));
      EXPECT_EQ(y[60 + column], 0.0F) << "too small to count";
    }
  });
}

std::vector<BlockCase> BlockCases() {
  std::vector<BlockCase> cases;
  for (const Unit& unit : Units()) {
    for (int format = 1; format < weights::kBlockFormats; ++format) {
      cases.push_back({unit, static_cast<weights::BlockFormat>(format)});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Units, BlockLinearTest, ::testing::ValuesIn(BlockCases()), [](const auto& param) {
  return param.param.unit.name + "_" + std::string(Name(param.param.format));
});

TEST(BlockLinear, StacksKeptAndQuantizedBlocks) {
  const BlockMatrix q4_0 = RandomBlocks(16, 64, weights::BlockFormat::kQ4_0, 7);
  const BlockMatrix q4_1 = RandomBlocks(16, 64, weights::BlockFormat::kQ4_1, 8);
  const BlockMatrix q8_0 = RandomBlocks(16, 64, weights::BlockFormat::kQ8_0, 9);
  const auto f32 = RandomValues(16 * 64, 10);
  const weights::WeightView views[] = {q4_0.View(), q4_1.View(), q8_0.View(), {f32.data(), DType::kF32, 16, 64}};
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  const auto linear = ops->MakeLinear(views, {}, WeightType::kInt4);
  std::vector<float> row(64);
  for (int64_t index = 0; index < 64; ++index) {
    linear->DequantizeRow(index, row.data());
    for (int64_t block = 0; block < 2; ++block) {
      const int64_t at = index % 16 * 2 + block;
      float values[weights::kBlockWeights];
      weights::WeightBlock expected;
      if (index < 16) {
        expected = weights::ReadBlock(&q4_0.bytes[static_cast<size_t>(at) * 18], weights::BlockFormat::kQ4_0);
      } else if (index < 32) {
        expected = weights::ReadBlock(&q4_1.bytes[static_cast<size_t>(at) * 20], weights::BlockFormat::kQ4_1);
      } else if (index < 48) {
        weights::DequantizeBlock(
            weights::ReadBlock(&q8_0.bytes[static_cast<size_t>(at) * 34], weights::BlockFormat::kQ8_0), values);
        expected = weights::QuantizeInt4(values, weights::kBlockWeights);
      } else {
        expected = weights::QuantizeInt4(f32.data() + (index - 48) * 64 + block * weights::kBlockWeights,
                                         weights::kBlockWeights);
      }
      weights::DequantizeBlock(expected, values);
      for (int i = 0; i < weights::kBlockWeights; ++i)
        ASSERT_EQ(row[block * weights::kBlockWeights + i], values[i]) << index;
    }
  }
}

TEST(BlockLinear, StacksWhatTheViewsStore) {
  const BlockMatrix q4_k = RandomBlocks(24, 256, weights::BlockFormat::kQ4_K, 7);
  const BlockMatrix q6_k = RandomBlocks(20, 256, weights::BlockFormat::kQ6_K, 8);
  const auto f32 = RandomValues(16 * 256, 9), bias = RandomValues(60, 10), x = RandomValues(3 * 256, 13);
  weights::WeightView views[] = {q4_k.View(), q6_k.View(), {f32.data(), DType::kF32, 16, 256}};
  views[0].interleaved_heads = 3;
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(2));
  const auto linear = ops->MakeLinear(views, bias, WeightType::kStored);
  ASSERT_EQ(linear->Out(), 60);
  std::vector<float> y(3 * 64, -77.0F);
  std::vector<RowArgmax> argmaxes(3);
  linear->Forward(x.data(), 3, y.data(), 64, argmaxes.data());
  int64_t first = 0;
  for (const weights::WeightView& view : views) {
    const auto own = std::span<const float>(bias).subspan(static_cast<size_t>(first), static_cast<size_t>(view.out));
    const auto part = ops->MakeLinear({&view, 1}, own, WeightType::kStored);
    const auto expected = Product(*part, x, 3, view.out);
    std::vector<float> row(256), same(256);
    for (int64_t column = 0; column < view.out; ++column) {
      for (int64_t r = 0; r < 3; ++r) ASSERT_EQ(y[r * 64 + first + column], expected[r * view.out + column]);
      linear->DequantizeRow(first + column, row.data());
      part->DequantizeRow(column, same.data());
      ASSERT_EQ(row, same);
    }
    first += view.out;
  }
  for (int64_t r = 0; r < 3; ++r) {
    const auto begin = y.begin() + r * 64, best = std::max_element(begin, begin + 60);
    EXPECT_TRUE(argmaxes[r].finite);
    EXPECT_EQ(argmaxes[r].column, best - begin);
    EXPECT_EQ(y[r * 64 + 60], -77.0F);
  }
  // Heads of 8 rows, stored in the order 0, 4, 1, 5, ...
  std::vector<float> row(256), stored(256);
  linear->DequantizeRow(8 + 5, row.data());
  weights::DequantizeBlocks(q4_k.bytes.data() + (8 + 3) * weights::RowBytes(weights::BlockFormat::kQ4_K, 256),
                            weights::BlockFormat::kQ4_K, 256, stored.data());
  EXPECT_EQ(row, stored);
}

TEST(BlockLinear, RejectsPartialBlocksAndNonFiniteScales) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  std::vector<uint8_t> bytes(34 * 16);
  const weights::WeightView ragged{bytes.data(), DType::kF32, 16, 33, weights::BlockFormat::kQ8_0};
  EXPECT_THROW(ops->MakeLinear({&ragged, 1}, {}, WeightType::kInt8), InputError);
  bytes[1] = 0x7c;  // infinity
  const weights::WeightView infinite{bytes.data(), DType::kF32, 16, 32, weights::BlockFormat::kQ8_0};
  EXPECT_THROW(ops->MakeLinear({&infinite, 1}, {}, WeightType::kInt8), InputError);
  const std::vector<float> large(32, 1e8F);
  const weights::WeightView elements{large.data(), DType::kF32, 1, 32};
  EXPECT_THROW(ops->MakeLinear({&elements, 1}, {}, WeightType::kInt8), InputError);
  EXPECT_THROW(ops->MakeLinear({&elements, 1}, {}, WeightType::kInt4), InputError);
}

}  // namespace
}  // namespace kvanta::kernels
