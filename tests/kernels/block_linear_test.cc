// Linear layers with blocks of 8 and 4 bits: comparison with double on the same codes for every unit, blocks read from
// a file, and the error of quantization.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "emulated/units.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/weight_blocks.h"
#include "kernels/ops.h"
#include "kernels/product.h"
#include "kernels/random_values.h"
#include "kvanta/error.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::BlockDotTolerance;
using kvanta::testing::Unit;
using kvanta::testing::Units;

// W as stored in a file, and the same blocks unpacked for the oracle.
struct BlockMatrix {
  int64_t out = 0, in = 0;
  BlockFormat format = BlockFormat::kNone;
  std::vector<uint8_t> bytes;
  std::vector<WeightBlock> blocks;  // [out][in / 32]

  WeightView View() const { return {bytes.data(), DType::kF32, out, in, format}; }
};

// Random codes; scales differ from block to block.
BlockMatrix RandomBlocks(int64_t out, int64_t in, BlockFormat format, uint32_t seed) {
  BlockMatrix w{out, in, format, {}, {}};
  std::mt19937 generator(seed);
  const auto put = [&](float value) {
    const uint16_t bits = FloatToFp16(value);
    w.bytes.push_back(static_cast<uint8_t>(bits));
    w.bytes.push_back(static_cast<uint8_t>(bits >> 8));
  };
  for (int64_t i = 0; i < out * in / kBlockWeights; ++i) {
    put(0.001F + 0.01F * static_cast<float>(generator() % 1000) / 1000);
    if (format == BlockFormat::kQ4_1) put(-0.1F + 0.1F * static_cast<float>(generator() % 1000) / 1000);
    const size_t end = static_cast<size_t>(i + 1) * static_cast<size_t>(BlockBytes(format));
    while (w.bytes.size() < end) w.bytes.push_back(static_cast<uint8_t>(generator()));
    w.blocks.push_back(ReadBlock(w.bytes.data() + end - BlockBytes(format), format));
  }
  return w;
}

// Expected codes and scale of a block of x, n <= 32.
struct ActivationBlock {
  float unit = 0;
  int codes[kBlockWeights] = {};
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

Expected Oracle(const WeightBlock* w, const float* x, int64_t in, double bias, bool wide) {
  Expected sum{bias, std::abs(bias)};
  for (int64_t begin = 0; begin < in; begin += kBlockWeights) {
    const ActivationBlock a =
        RoundActivations(x + begin, std::min<int64_t>(kBlockWeights, in - begin), wide ? 32512 : 127);
    const WeightBlock& block = w[begin / kBlockWeights];
    int dot = 0, total = 0;
    for (int i = 0; i < kBlockWeights; ++i) {
      dot += block.codes[i] * a.codes[i];
      total += a.codes[i];
    }
    const double product = double{Fp16ToFloat(block.scale)} * a.unit * dot;
    const double rest = double{Fp16ToFloat(block.offset)} * a.unit * total;
    sum.value += product + rest;
    sum.magnitude += std::abs(product) + std::abs(rest);
  }
  return sum;
}

WeightType StorageOf(BlockFormat format) {
  return format == BlockFormat::kQ8_0 ? WeightType::kInt8 : WeightType::kInt4;
}

struct BlockCase {
  Unit unit;
  BlockFormat format;
  bool wide;

  LinearKind Kind() const { return {StorageOf(format), wide}; }
};

class BlockLinearTest : public ::testing::TestWithParam<BlockCase> {
 protected:
  std::unique_ptr<Ops> MakeOps() const { return MakeCpuOps(std::make_shared<ThreadPool>(2), *GetParam().unit.table); }

  void ExpectOracle(int64_t out, int64_t in, int64_t rows) const {
    SCOPED_TRACE(::testing::Message() << "out " << out << " in " << in << " rows " << rows);
    const BlockMatrix w = RandomBlocks(out, in, GetParam().format, 1);
    const auto x = RandomValues(rows * in, 2);
    const auto bias = RandomValues(out, 3);
    const auto ops = MakeOps();
    const WeightView view = w.View();
    const auto linear = ops->MakeLinear({&view, 1}, bias, GetParam().Kind());
    const int64_t y_stride = out + 5;
    const auto y = Product(*linear, x, rows, y_stride);
    const int64_t blocks = in / kBlockWeights;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < out; ++column) {
        const Expected expected = Oracle(&w.blocks[column * blocks], &x[row * in], in, bias[column], GetParam().wide);
        ASSERT_NEAR(y[row * y_stride + column], expected.value, BlockDotTolerance(blocks, expected.magnitude))
            << "row " << row << " column " << column;
      }
      for (int64_t column = out; column < y_stride; ++column) ASSERT_EQ(y[row * y_stride + column], -77.0F);
    }
  }
};

TEST_P(BlockLinearTest, MatchesTheOracleOnTheSameCodes) {
  for (const int64_t in : {32, 64, 576}) {
    for (const int64_t out : {1, 16, 50}) {
      for (const int64_t rows : {1, 2, 3, 13}) ExpectOracle(out, in, rows);
    }
  }
  ExpectOracle(40, 2080, 26);  // three blocks of steps, sums carried from one to the next
  ExpectOracle(33, 96, 250);   // three blocks of rows
}

TEST_P(BlockLinearTest, KeepsBlocksOfTheFile) {
  const BlockMatrix w = RandomBlocks(37, 96, GetParam().format, 4);
  const WeightView view = w.View();
  const auto ops = MakeOps();
  const auto linear = ops->MakeLinear({&view, 1}, {}, GetParam().Kind());
  std::vector<float> row(96);
  for (int64_t index = 0; index < 37; ++index) {
    linear->DequantizeRow(index, row.data());
    for (int64_t block = 0; block < 3; ++block) {
      float values[kBlockWeights];
      BlockValues(w.blocks[index * 3 + block], values);
      ASSERT_EQ(std::memcmp(values, row.data() + block * kBlockWeights, sizeof values), 0) << index << ", " << block;
    }
  }
  EXPECT_EQ(linear->WeightBytes(), 48 * 3 * BlockBytes(w.format)) << "48 columns, three panels";
}

// The largest codes of one sign with the largest activations (127, or 32,512 = 127 * 256): sums of 16 or 32 bits must
// not overflow, and all sums are exact in f32.
TEST_P(BlockLinearTest, ExtremeCodesAreExact) {
  BlockMatrix w{16, 64, GetParam().format, {}, {}};
  for (int i = 0; i < 32; ++i) {
    const int size = BlockBytes(w.format);
    const uint16_t one = FloatToFp16(1);
    w.bytes.push_back(static_cast<uint8_t>(one));
    w.bytes.push_back(static_cast<uint8_t>(one >> 8));
    // 127 or -128, 7 or -8, 15 or 0
    const bool high = i % 4 < 2;
    const uint8_t code = w.format == BlockFormat::kQ8_0 ? (high ? 127 : 128) : (high ? 255 : 0);
    while (static_cast<int>(w.bytes.size()) < (i + 1) * size) {
      const bool is_offset = w.format == BlockFormat::kQ4_1 && static_cast<int>(w.bytes.size()) < i * size + 4;
      w.bytes.push_back(is_offset ? 0 : code);
    }
    w.blocks.push_back(ReadBlock(w.bytes.data() + i * size, w.format));
  }
  const WeightView view = w.View();
  const auto ops = MakeOps();
  const auto linear = ops->MakeLinear({&view, 1}, {}, GetParam().Kind());
  for (const float sign : {1.0F, -1.0F}) {
    const auto y = Product(*linear, std::vector<float>(64, 32512 * sign), 1, 16);
    for (int64_t column = 0; column < 16; ++column) {
      const auto* blocks = &w.blocks[column * 2];
      const int sum = 32 * (blocks[0].codes[0] + blocks[1].codes[0]);
      EXPECT_EQ(y[column], 32512 * sign * static_cast<float>(sum)) << column;
    }
  }
}

TEST_P(BlockLinearTest, NonFiniteValuesAffectOnlyTheirRow) {
  const BlockMatrix w = RandomBlocks(20, 64, GetParam().format, 5);
  const WeightView view = w.View();
  const auto ops = MakeOps();
  const auto linear = ops->MakeLinear({&view, 1}, {}, GetParam().Kind());
  auto x = RandomValues(4 * 64, 6);
  x[64 + 3] = std::numeric_limits<float>::quiet_NaN();
  x[128 + 40] = -std::numeric_limits<float>::infinity();
  for (int64_t k = 0; k < 64; ++k) x[192 + k] = k == 0 ? 1e-38F : 0.0F;
  const auto y = Product(*linear, x, 4, 20);
  for (int64_t column = 0; column < 20; ++column) {
    EXPECT_TRUE(std::isfinite(y[column]));
    EXPECT_TRUE(std::isnan(y[20 + column]));
    EXPECT_TRUE(std::isnan(y[40 + column]));
    EXPECT_EQ(y[60 + column], 0.0F) << "too small to count";
  }
}

std::vector<BlockCase> BlockCases() {
  std::vector<BlockCase> cases;
  for (const Unit& unit : Units()) {
    for (const BlockFormat format : {BlockFormat::kQ8_0, BlockFormat::kQ4_0, BlockFormat::kQ4_1}) {
      cases.push_back({unit, format, false});
      cases.push_back({unit, format, true});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Units, BlockLinearTest, ::testing::ValuesIn(BlockCases()), [](const auto& param) {
  return param.param.unit.name + "_" + std::string(Name(param.param.format)) + (param.param.wide ? "_wide" : "");
});

TEST(BlockLinear, StacksKeptAndQuantizedBlocks) {
  const BlockMatrix q4_0 = RandomBlocks(16, 64, BlockFormat::kQ4_0, 7);
  const BlockMatrix q4_1 = RandomBlocks(16, 64, BlockFormat::kQ4_1, 8);
  const BlockMatrix q8_0 = RandomBlocks(16, 64, BlockFormat::kQ8_0, 9);
  const auto f32 = RandomValues(16 * 64, 10);
  const WeightView views[] = {q4_0.View(), q4_1.View(), q8_0.View(), {f32.data(), DType::kF32, 16, 64}};
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  const auto linear = ops->MakeLinear(views, {}, WeightType::kInt4);
  std::vector<float> row(64);
  for (int64_t index = 0; index < 64; ++index) {
    linear->DequantizeRow(index, row.data());
    for (int64_t block = 0; block < 2; ++block) {
      const int64_t at = index % 16 * 2 + block;
      float values[kBlockWeights];
      WeightBlock expected;
      if (index < 16) {
        expected = q4_0.blocks[at];
      } else if (index < 32) {
        expected = q4_1.blocks[at];
      } else if (index < 48) {
        BlockValues(q8_0.blocks[at], values);
        expected = QuantizeInt4(values, kBlockWeights);
      } else {
        expected = QuantizeInt4(f32.data() + (index - 48) * 64 + block * kBlockWeights, kBlockWeights);
      }
      BlockValues(expected, values);
      for (int i = 0; i < kBlockWeights; ++i) ASSERT_EQ(row[block * kBlockWeights + i], values[i]) << index;
    }
  }
}

TEST(BlockLinear, RejectsPartialBlocksAndNonFiniteScales) {
  const auto ops = MakeCpuOps(std::make_shared<ThreadPool>(1));
  std::vector<uint8_t> bytes(34 * 16);
  const WeightView ragged{bytes.data(), DType::kF32, 16, 33, BlockFormat::kQ8_0};
  EXPECT_THROW(ops->MakeLinear({&ragged, 1}, {}, WeightType::kInt8), InputError);
  bytes[1] = 0x7c;  // infinity
  const WeightView infinite{bytes.data(), DType::kF32, 16, 32, BlockFormat::kQ8_0};
  EXPECT_THROW(ops->MakeLinear({&infinite, 1}, {}, WeightType::kInt8), InputError);
  const std::vector<float> large(32, 1e8F);
  const WeightView elements{large.data(), DType::kF32, 1, 32};
  EXPECT_THROW(ops->MakeLinear({&elements, 1}, {}, WeightType::kInt8), InputError);
  EXPECT_THROW(ops->MakeLinear({&elements, 1}, {}, WeightType::kInt4), InputError);
}

double SquaredError(const WeightBlock& block, const float* x, int n) {
  float values[kBlockWeights];
  BlockValues(block, values);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += (double{values[i]} - x[i]) * (double{values[i]} - x[i]);
  return sum;
}

TEST(Quantize, Int8IsWithinHalfAStep) {
  const auto x = RandomValues(100 * 32, 11, 0.03F);
  for (int block = 0; block < 100; ++block) {
    const float* values = &x[block * 32];
    const int n = block % 32 + 1;
    const WeightBlock q = QuantizeInt8(values, n);
    float out[kBlockWeights];
    BlockValues(q, out);
    for (int i = 0; i < kBlockWeights; ++i) {
      // Half a step; where fp16 rounds the scale down, the largest code is clipped: 127 of its 2^-11.
      ASSERT_NEAR(out[i], i < n ? values[i] : 0, Fp16ToFloat(q.scale) * (i < n ? 0.5 + 127 * 0x1p-11 : 0));
    }
  }
}

TEST(Quantize, Int4HasASmallerErrorThanTheFullRange) {
  const auto x = RandomValues(400 * 32, 12, 0.03F);
  double best = 0;
  double plain = 0;
  for (int block = 0; block < 400; ++block) {
    const float* values = &x[block * 32];
    best += SquaredError(QuantizeInt4(values, 32), values, 32);
    const auto [low, high] = std::minmax_element(values, values + 32);
    WeightBlock range;
    range.scale = FloatToFp16((*high - *low) / 15);
    range.offset = FloatToFp16(*low);
    for (int i = 0; i < 32; ++i) {
      const float code = std::nearbyint((values[i] - Fp16ToFloat(range.offset)) / Fp16ToFloat(range.scale));
      range.codes[i] = static_cast<int8_t>(std::min(15.0F, std::max(0.0F, code)));
    }
    plain += SquaredError(range, values, 32);
  }
  EXPECT_LT(best, 0.9 * plain);
}

TEST(Quantize, Int4OfConstantsZerosAndPartialBlocks) {
  const std::vector<float> constant(32, -0.25F);
  EXPECT_EQ(SquaredError(QuantizeInt4(constant.data(), 32), constant.data(), 32), 0);
  const std::vector<float> zeros(32);
  EXPECT_EQ(SquaredError(QuantizeInt4(zeros.data(), 32), zeros.data(), 32), 0);
  const std::vector<float> two = {-1, 2};
  EXPECT_LT(SquaredError(QuantizeInt4(two.data(), 2), two.data(), 2), 1e-5);
  // 16 equidistant values whose scale and offset fp16 represents exactly.
  std::vector<float> steps(32);
  for (int i = 0; i < 32; ++i) steps[i] = 0.125F * static_cast<float>(i % 16) - 0.5F;
  EXPECT_EQ(SquaredError(QuantizeInt4(steps.data(), 32), steps.data(), 32), 0);
}

}  // namespace
}  // namespace kvanta::kernels
