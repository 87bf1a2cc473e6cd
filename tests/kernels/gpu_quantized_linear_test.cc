// Linear layers that keep quantized weights on an emulated and, if present, a real GPU: products of the stored values
// in doubles, with bits that do not depend on the number of rows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "emulated/gpus.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/random_values.h"
#include "kernels/random_weight.h"
#include "tolerance.h"
#include "weights/block_format.h"

namespace kvanta::kernels {
namespace {

using weights::BlockFormat;

// Row counts below and above each tile, and enough outputs that the last one takes the largest.
constexpr int64_t kProductRows[] = {1, 2, 9, 33,
#ifndef KVANTA_SANITIZED
                                    200
#endif
};

class GpuQuantizedLinearTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    Start(GetParam());
    if (gpu_ != nullptr) ops_ = MakeGpuOps(gpu_, std::make_shared<ThreadPool>(1));
  }

  // w: the weights, [out][in]; max_bits: of a weight as it is stored, in hundredths.
  void ExpectProducts(const Linear& linear, const std::vector<float>& w, int64_t max_bits);

  std::unique_ptr<Ops> ops_;
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuQuantizedLinearTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

void GpuQuantizedLinearTest::ExpectProducts(const Linear& linear, const std::vector<float>& w, int64_t max_bits) {
  const int64_t out = linear.Out(), in = linear.In(), max_rows = 200;
  EXPECT_LE(8 * linear.WeightBytes(), (out + 15) / 16 * 16 * ((in + 31) / 32 * 32) * max_bits / 100);
  const Buffer row = Upload(std::vector<float>(static_cast<size_t>(in)));
  for (int64_t o = 0; o < out; ++o) {
    linear.DequantizeRow(o, row.as<float>());
    const std::vector<float> values = Download(row);
    for (int64_t k = 0; k < in; ++k) {
      const float expected = w[static_cast<size_t>(o * in + k)];
      ASSERT_NEAR(values[static_cast<size_t>(k)], expected, 1e-6F * std::abs(expected) + 1e-7F) << o << ", " << k;
    }
  }
  const std::vector<float> x = RandomValues(max_rows * in, 3);
  const Buffer device_x = Upload(x);
  std::vector<float> first;  // each row's result, from the smallest batch that has it
  for (const int64_t rows : kProductRows) {
    const Buffer device_y = Upload(std::vector<float>(static_cast<size_t>(rows * out), NAN));
    linear.Forward(device_x.as<float>(), rows, device_y.as<float>(), out);
    const std::vector<float> y = Download(device_y);
    if (!first.empty()) {
      ASSERT_EQ(std::memcmp(y.data(), first.data(), first.size() * sizeof(float)), 0) << rows << " rows";
    }
    for (int64_t r = std::ssize(first) / out; r < rows; ++r) {
      float largest = 0;
      for (int64_t k = 0; k < in; ++k) largest = std::max(largest, std::abs(x[static_cast<size_t>(r * in + k)]));
      const float scale = std::ldexp(1.0F, 14 - std::ilogb(largest));
      for (int64_t o = 0; o < out; ++o) {
        double sum = 0, magnitudes = 0;
        for (int64_t k = 0; k < in; ++k) {
          const float rounded = Fp16ToFloat(FloatToFp16(x[static_cast<size_t>(r * in + k)] * scale)) / scale;
          const double term = double{rounded} * double{w[static_cast<size_t>(o * in + k)]};
          sum += term;
          magnitudes += std::abs(term);
        }
        // Codes and their offset are summed separately.
        ASSERT_NEAR(y[static_cast<size_t>(r * out + o)], sum, testing::GpuDotTolerance(in, 32 * magnitudes))
            << "row " << r << " of " << rows << ", column " << o;
      }
    }
    first = y;
  }
}

TEST_P(GpuQuantizedLinearTest, FormatsOfCheckpoints) {
  const int64_t in = 384;
  uint32_t seed = 10;
  for (const weights::KernelFormat& format : weights::kKernelFormats) {
    SCOPED_TRACE(std::string(format.name) + " in groups of " + std::to_string(format.group));
    const weights::QuantizedFormat stored{.codes = format.codes, .scales = format.scales, .group = format.group};
    const RandomWeight a(24, in, stored, seed++), b(13, in, stored, seed++);
    const weights::QuantizedView views[] = {{&a}, {&b}};
    const auto linear = ops_->MakeQuantizedLinear(views, {});
    if (format.codes == weights::CodeType::kNf4) {  // quantiles, which f16 would round
      EXPECT_EQ(linear, nullptr);
      continue;
    }
    ASSERT_NE(linear, nullptr);
    EXPECT_EQ(linear->Kind(), format.name);
    std::vector<float> w(static_cast<size_t>(37 * in));
    for (int64_t row = 0; row < 37; ++row) {
      (row < 24 ? a : b).DequantizeRow(row < 24 ? row : row - 24, w.data() + row * in);
    }
    const bool wide_scales = format.scales == weights::GroupScale::kF32 && format.group == 32;
    ExpectProducts(*linear, w, (CodeBits(format.codes) + (wide_scales ? 2 : 1)) * 100);
  }
}

TEST_P(GpuQuantizedLinearTest, FewOutputsAndAGroupForTheWholeRow) {
  const RandomWeight weight(5, 96, {.codes = weights::CodeType::kE4M3, .group = 96}, 77);
  const weights::QuantizedView view{&weight};
  const auto linear = ops_->MakeQuantizedLinear({&view, 1}, {});
  if (linear == nullptr) GTEST_SKIP() << "no group of the kernels divides 96";
  std::vector<float> w(size_t{5} * 96);
  for (int64_t row = 0; row < 5; ++row) weight.DequantizeRow(row, w.data() + row * 96);
  ExpectProducts(*linear, w, 1000);
}

TEST_P(GpuQuantizedLinearTest, ColumnsInAnotherOrderAreNotKept) {
  const RandomWeight weight(8, 128, {.codes = weights::CodeType::kInt4, .group = 32}, 5, true);
  const weights::QuantizedView view{&weight};
  EXPECT_EQ(ops_->MakeQuantizedLinear({&view, 1}, {}), nullptr);
}

// Random blocks with scales that are small numbers.
std::vector<uint8_t> RandomBlocks(BlockFormat format, int64_t blocks, uint32_t seed) {
  std::mt19937 generator(seed);
  const int bytes = weights::BlockBytes(format);
  std::vector<uint8_t> data(static_cast<size_t>(blocks * bytes));
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* at = data.data() + block * bytes;
    const uint16_t scale = FloatToFp16(0.001F + 1e-5F * static_cast<float>(generator() % 100));
    if (format == BlockFormat::kMXFP4) {
      at[0] = static_cast<uint8_t>(115 + generator() % 10);
    } else if (format == BlockFormat::kQ6_K || format == BlockFormat::kQ3_K) {
      std::memcpy(at + bytes - 2, &scale, 2);
    } else {
      std::memcpy(at, &scale, 2);
      if (format == BlockFormat::kQ4_K || format == BlockFormat::kQ5_K || format == BlockFormat::kQ5_1) {
        std::memcpy(at + 2, &scale, 2);
      }
    }
  }
  return data;
}

TEST_P(GpuQuantizedLinearTest, BlocksOfGguf) {
  struct Case {
    BlockFormat format;
    const char* kind;
    int bits;  // per weight, in hundredths
  };
  constexpr Case kCases[] = {
      {BlockFormat::kMXFP4, "MXFP4", 425},        {BlockFormat::kQ4_K, "4-bit blocks", 550},
      {BlockFormat::kQ6_K, "8-bit blocks", 950},  {BlockFormat::kQ5_K, "8-bit blocks", 950},
      {BlockFormat::kQ3_K, "8-bit blocks", 950},  {BlockFormat::kQ5_0, "8-bit blocks", 1100},
      {BlockFormat::kQ5_1, "8-bit blocks", 1100}, {BlockFormat::kIQ4_XS, "8-bit blocks", 950},
  };
  const int64_t out = 37, in = 512;
  uint32_t seed = 50;
  for (const auto& [format, kind, bits] : kCases) {
    SCOPED_TRACE(Name(format));
    const std::vector<uint8_t> blocks = RandomBlocks(format, out * in / weights::BlockWeights(format), seed++);
    const weights::WeightView view{.data = blocks.data(), .out = out, .in = in, .blocks = format};
    const auto linear = ops_->MakeLinear({&view, 1}, {}, WeightType::kStored);
    EXPECT_EQ(linear->Kind(), kind);
    std::vector<float> w(static_cast<size_t>(out * in));
    for (int64_t row = 0; row < out; ++row) {
      weights::DequantizeBlocks(view.RowData(row), format, in, w.data() + row * in);
    }
    ExpectProducts(*linear, w, bits);
  }
}

// A stack of Q4_K and Q6_K, as files of kind Q4_K_M have them, is one layer.
TEST_P(GpuQuantizedLinearTest, StacksOfDifferentBlocks) {
  const int64_t in = 256;
  const std::vector<uint8_t> q4 = RandomBlocks(BlockFormat::kQ4_K, 20, 90),
                             q6 = RandomBlocks(BlockFormat::kQ6_K, 9, 91);
  const weights::WeightView views[] = {{.data = q4.data(), .out = 20, .in = in, .blocks = BlockFormat::kQ4_K},
                                       {.data = q6.data(), .out = 9, .in = in, .blocks = BlockFormat::kQ6_K}};
  const auto linear = ops_->MakeLinear(views, {}, WeightType::kStored);
  std::vector<float> w(static_cast<size_t>(29 * in));
  for (int64_t row = 0; row < 29; ++row) {
    const weights::WeightView& view = views[row < 20 ? 0 : 1];
    weights::DequantizeBlocks(view.RowData(row < 20 ? row : row - 20), view.blocks, in, w.data() + row * in);
  }
  ExpectProducts(*linear, w, 950);
}

}  // namespace
}  // namespace kvanta::kernels
