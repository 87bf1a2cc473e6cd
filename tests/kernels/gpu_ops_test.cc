// A model's operations on an emulated and, if present, a real GPU: linear layers against doubles on the stored weights,
// others against the CPU; bits do not depend on the number of rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "base/math.h"
#include "kernels/cuda/cuda_context.h"
#include "kernels/gpu_and_cpu.h"
#include "kernels/random_values.h"
#include "kvanta/error.h"
#include "tolerance.h"
#include "weights/weight_blocks.h"

namespace kvanta::kernels {
namespace {

class GpuOpsTest : public testing::GpuAndCpuTest {
 protected:
  void ExpectProducts(int64_t out, int64_t in);
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuOpsTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

// x as the matrix product uses it: rounded to bf16 for bf16 weights, otherwise to f16 after scaling by a power of two.
std::vector<float> Rounded(const float* x, int64_t in, WeightType store) {
  std::vector<float> result(x, x + in);
  if (store == WeightType::kF32) return result;
  float largest = 0;
  for (const float value : result) largest = std::max(largest, std::abs(value));
  const float scale = store == WeightType::kBf16 ? 1.0F : std::ldexp(1.0F, 14 - std::ilogb(largest));
  for (float& value : result) {
    value =
        store == WeightType::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : Fp16ToFloat(FloatToFp16(value * scale)) / scale;
  }
  return result;
}

constexpr WeightType kStores[] = {WeightType::kBf16, WeightType::kInt8, WeightType::kInt4, WeightType::kF16,
                                  WeightType::kF32};
// Row counts below and above each tile.
constexpr int64_t kRows[] = {1,  2, 3, 8, 17, 64,
#ifndef KVANTA_SANITIZED
                             200
#endif
};

// A linear group gives each layer's rows the bits of that layer alone, with more layers than one launch takes and more
// rows than are packed at once.
TEST_P(GpuOpsTest, GroupMatchesItsLayers) {
  constexpr int64_t kOut = 24, kIn = 40;
  struct GroupSize {
    int64_t layers, rows;
  };
  constexpr GroupSize kSizes[] = {{70, 3},
#ifndef KVANTA_SANITIZED
                                  {3, 9},
                                  {2, 515}
#endif
  };
  for (const WeightType store : kStores) {
    for (const auto& [count, rows] : kSizes) {
      const int64_t x_stride = count * kIn + 1, y_stride = count * (kOut + 2);
      const Buffer x = Upload(RandomValues(rows * x_stride, 61));
      const Buffer y = Upload(std::vector<float>(static_cast<size_t>(rows * y_stride), -77.0F));
      const Buffer expected = Upload(std::vector<float>(static_cast<size_t>(rows * y_stride), -77.0F));
      const Buffer part = Upload(std::vector<float>(static_cast<size_t>(rows * kIn)));
      std::vector<std::unique_ptr<Linear>> layers;
      for (int64_t i = 0; i < count; ++i) {
        const std::vector<float> w = RandomValues(kOut * kIn, static_cast<uint32_t>(100 + i));
        const weights::WeightView view{w.data(), DType::kF32, kOut, kIn};
        layers.push_back(ops_->MakeLinear({&view, 1}, {}, store));
        ops_->Copy(x.as<float>() + i * kIn, x_stride, rows, kIn, part.as<float>(), kIn);
        layers.back()->Forward(part.as<float>(), rows, expected.as<float>() + i * (kOut + 2), y_stride);
      }
      const std::unique_ptr<LinearGroup> group = ops_->MakeGroup(std::move(layers));
      group->Forward({x.as<float>(), x_stride, kIn}, rows, {y.as<float>(), y_stride, kOut + 2});
      ASSERT_EQ(Download(y), Download(expected)) << count << " layers of " << rows << " rows";
    }
  }
}

// With 200 channels some warps are idle; with 2,400 each has more units than it keeps in flight, the last warp fewer.
TEST_P(GpuOpsTest, LinearMatchesForAnyRowCount) {
  ExpectProducts(72, 200);
}
TEST_P(GpuOpsTest, LongLinearMatchesForAnyRowCount) {
  ExpectProducts(40, 2400);
}

// Enough outputs that 200 rows take the largest tiles; one row takes the smallest.
TEST_P(GpuOpsTest, LargeTilesHaveTheBitsOfSmallOnes) {
  const int64_t out = 128 * CeilDiv(3 * gpu_->Multiprocessors(), 8) + 8, rows = 200, alone = 131;
  for (const int64_t in : {200, 1300}) {
    const std::vector<float> w = RandomValues(out * in, 4), x = RandomValues(rows * in, 3), bias = RandomValues(out, 5);
    const weights::WeightView view{w.data(), DType::kF32, out, in};
    const Buffer device_x = Upload(x);
    for (const WeightType store : kStores) {
      if (store == WeightType::kF32) continue;
      const auto linear = ops_->MakeLinear({&view, 1}, bias, store);
      SCOPED_TRACE(linear->Kind());
      const Buffer device_y = Upload(std::vector<float>(static_cast<size_t>(rows * out)));
      linear->Forward(device_x.as<float>(), rows, device_y.as<float>(), out);
      const std::vector<float> y = Download(device_y);
      linear->Forward(device_x.as<float>() + alone * in, 1, device_y.as<float>(), out);
      const std::vector<float> row = Download(device_y);
      ASSERT_EQ(std::memcmp(row.data(), y.data() + alone * out, static_cast<size_t>(out) * sizeof(float)), 0);
    }
  }
}

void GpuOpsTest::ExpectProducts(int64_t out, int64_t in) {
  const int64_t max_rows = 200, stride = out + 3, split = out / 2 + 4;
  std::vector<float> x = RandomValues(max_rows * in, 3);
  for (int64_t i = 0; i < in; ++i) x[static_cast<size_t>(2 * in + i)] *= 1e4F;  // rows of different magnitude
  x[static_cast<size_t>(in)] = 300;                                             // an outlier in its row
  const std::vector<float> w = RandomValues(out * in, 4);
  const std::vector<float> bias = RandomValues(out, 5);
  const weights::WeightView views[] = {{w.data(), DType::kF32, split, in},
                                       {w.data() + split * in, DType::kF32, out - split, in}};
  const Buffer device_x = Upload(x);
  for (const WeightType store : kStores) {
    const auto linear = ops_->MakeLinear(views, bias, store);
    SCOPED_TRACE(linear->Kind());
    std::vector<float> stored;
    for (int64_t o = 0; o < out; ++o) {
      Buffer row = gpu_->device().Allocate(static_cast<size_t>(in) * sizeof(float));
      linear->DequantizeRow(o, row.as<float>());
      const std::vector<float> values = Download(row);
      stored.insert(stored.end(), values.begin(), values.end());
    }
    // The CPU stores the same values.
    const auto on_cpu = cpu_->MakeLinear(views, bias, store);
    std::vector<float> row(static_cast<size_t>(in));
    for (int64_t o = 0; o < out; ++o) {
      on_cpu->DequantizeRow(o, row.data());
      ASSERT_TRUE(std::equal(row.begin(), row.end(), stored.begin() + o * in)) << "row " << o << " of W";
    }
    std::vector<float> first;  // each row's result, from the smallest batch that has it
    for (const int64_t rows : kRows) {
      const Buffer device_y = Upload(std::vector<float>(static_cast<size_t>(rows * stride), -77.0F));
      linear->Forward(device_x.as<float>(), rows, device_y.as<float>(), stride);
      const std::vector<float> y = Download(device_y);
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_EQ(y[static_cast<size_t>(r * stride + out)], -77.0F) << "written beyond the row";
        if (std::ssize(first) > r * out) continue;
        const std::vector<float> rounded = Rounded(x.data() + r * in, in, store);
        for (int64_t o = 0; o < out; ++o) {
          double sum = bias[static_cast<size_t>(o)];
          double magnitudes = std::abs(sum);
          for (int64_t k = 0; k < in; ++k) {
            const double term =
                double{rounded[static_cast<size_t>(k)]} * double{stored[static_cast<size_t>(o * in + k)]};
            sum += term;
            // 4-bit codes and their minimum are summed separately.
            magnitudes += (store == WeightType::kInt4 ? 16 : 1) * std::abs(term) +
                          (store == WeightType::kInt4 ? std::abs(double{rounded[static_cast<size_t>(k)]}) * 4 : 0);
          }
          ASSERT_NEAR(y[static_cast<size_t>(r * stride + o)], sum, testing::GpuDotTolerance(in, magnitudes))
              << "row " << r << " of " << rows << ", column " << o;
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float* now = y.data() + r * stride;
        if (std::ssize(first) <= r * out) {
          first.insert(first.end(), now, now + out);
        } else {
          ASSERT_EQ(std::memcmp(now, first.data() + r * out, static_cast<size_t>(out) * sizeof(float)), 0)
              << "row " << r << " of " << rows << " has other bits";
        }
      }
    }
  }
}

TEST_P(GpuOpsTest, GgufBlocksAreKept) {
  const int64_t out = 16, in = 64;
  for (const weights::BlockFormat format :
       {weights::BlockFormat::kQ8_0, weights::BlockFormat::kQ4_0, weights::BlockFormat::kQ4_1}) {
    SCOPED_TRACE(Name(format));
    const int64_t blocks = out * in / weights::kBlockWeights;
    std::vector<uint8_t> bytes(static_cast<size_t>(blocks * weights::BlockBytes(format)));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 + i / 7);
    for (int64_t block = 0; block < blocks; ++block) {  // finite scales
      uint8_t* at = bytes.data() + block * weights::BlockBytes(format);
      const uint16_t scale = FloatToFp16(0.01F * static_cast<float>(block + 1));
      std::memcpy(at, &scale, 2);
      if (format == weights::BlockFormat::kQ4_1) std::memcpy(at + 2, &scale, 2);
    }
    const weights::WeightView view{.data = bytes.data(), .out = out, .in = in, .blocks = format};
    const WeightType type = format == weights::BlockFormat::kQ8_0 ? WeightType::kInt8 : WeightType::kInt4;
    const auto linear = ops_->MakeLinear({&view, 1}, {}, type);
    for (const int64_t row : {int64_t{0}, int64_t{9}, out - 1}) {
      Buffer read = gpu_->device().Allocate(static_cast<size_t>(in) * sizeof(float));
      linear->DequantizeRow(row, read.as<float>());
      const std::vector<float> values = Download(read);
      for (int64_t block = 0; block < in / weights::kBlockWeights; ++block) {
        float expected[weights::kBlockWeights];
        const uint8_t* at = bytes.data() + (row * (in / weights::kBlockWeights) + block) * weights::BlockBytes(format);
        weights::DequantizeBlock(weights::ReadBlock(at, format), expected);
        for (int i = 0; i < weights::kBlockWeights; ++i) {
          ASSERT_NEAR(values[static_cast<size_t>(block * weights::kBlockWeights + i)], expected[i],
                      16 * std::abs(expected[0]) * 1e-6 + 1e-6);
        }
      }
    }
  }
  const float wide = 1e9F;
  std::vector<float> w(32, wide);
  w[0] = -wide;
  const weights::WeightView view{w.data(), DType::kF32, 1, 32};
  EXPECT_THROW(ops_->MakeLinear({&view, 1}, {}, WeightType::kInt4), InputError);
}

void ExpectClose(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(a[i], b[i], testing::kGpuRowTolerance * std::max(1.0F, std::abs(b[i]))) << i;
  }
}

TEST_P(GpuOpsTest, NormsAndCopiesMatchTheCpu) {
  constexpr int64_t kRowCount = 5;
  for (const int64_t width : {int64_t{24}, int64_t{600}}) {
    const int64_t stride = width + 7;
    const std::vector<float> x = RandomValues(kRowCount * stride, 7);
    const std::vector<float> weight = RandomValues(width, 8);
    std::vector<float> expected(static_cast<size_t>(kRowCount * width));
    cpu_->RmsNorm(x.data(), stride, weight.data(), 1e-5F, kRowCount, width, expected.data(), width);
    const Buffer device_x = Upload(x), device_weight = Upload(weight), out = Upload(expected);
    gpu_->device().Fill(out.data(), 0xFF, out.bytes());
    ops_->RmsNorm(device_x.as<float>(), stride, device_weight.as<float>(), 1e-5F, kRowCount, width, out.as<float>(),
                  width);
    const std::vector<float> all = Download(out);
    ExpectClose(all, expected);
    // A single row has the same bits.
    ops_->RmsNorm(device_x.as<float>() + 3 * stride, stride, device_weight.as<float>(), 1e-5F, 1, width,
                  out.as<float>(), width);
    EXPECT_EQ(std::memcmp(Download(out).data(), all.data() + 3 * width, static_cast<size_t>(width) * 4), 0);

    const Buffer device_bias = Upload(x);
    for (const bool has_bias : {false, true}) {
      const auto norm = [&](Ops& ops, const float* input, const float* weights, const float* bias, int64_t rows,
                            float* to) {
        ops.LayerNorm(input, stride, weights, has_bias ? bias : nullptr, 1e-5F, rows, width, to, width);
      };
      norm(*cpu_, x.data(), weight.data(), x.data(), kRowCount, expected.data());
      gpu_->device().Fill(out.data(), 0xFF, out.bytes());
      norm(*ops_, device_x.as<float>(), device_weight.as<float>(), device_bias.as<float>(), kRowCount, out.as<float>());
      const std::vector<float> normed = Download(out);
      ExpectClose(normed, expected);
      norm(*ops_, device_x.as<float>() + 3 * stride, device_weight.as<float>(), device_bias.as<float>(), 1,
           out.as<float>());
      EXPECT_EQ(std::memcmp(Download(out).data(), normed.data() + 3 * width, static_cast<size_t>(width) * 4), 0);
    }

    cpu_->Copy(x.data(), stride, kRowCount, width, expected.data(), width);
    ops_->Copy(device_x.as<float>(), stride, kRowCount, width, out.as<float>(), width);
    EXPECT_EQ(Download(out), expected);
  }
}

// Rows that an operation packs for the layer that reads them give the bits of rows that the layer packs.
TEST_P(GpuOpsTest, OperationsPackForTheirReaders) {
  constexpr int64_t kRowCount = 9, kWidth = 200, kOut = 40;
  const std::vector<float> w = RandomValues(kOut * kWidth, 21), weight = RandomValues(kWidth, 22);
  const std::vector<float> x = RandomValues(kRowCount * kWidth, 23), y = RandomValues(kRowCount * kWidth, 24);
  const weights::WeightView view{w.data(), DType::kF32, kOut, kWidth};
  const Buffer device_y = Upload(y), device_weight = Upload(weight),
               gate_up = Upload(RandomValues(kRowCount * 2 * kWidth, 25));
  std::vector<float> sum = x, normed = x;
  cpu_->AddRmsNorm(sum.data(), y.data(), weight.data(), 1e-5F, kRowCount, kWidth, normed.data(), nullptr);
  for (const WeightType store : kStores) {
    const std::unique_ptr<Linear> linear = ops_->MakeLinear({&view, 1}, {}, store);
    const std::unique_ptr<Linear> other = ops_->MakeLinear({&view, 1}, {}, store);
    SCOPED_TRACE(linear->Kind());
    const Buffer out = Upload(x), result = Upload(std::vector<float>(static_cast<size_t>(kRowCount * kOut)));
    const auto forward = [&](const Linear& layer) {
      layer.Forward(out.as<float>(), kRowCount, result.as<float>(), kOut);
      return Download(result);
    };
    const auto norm = [&](const Linear* reader) {
      const Buffer device_x = Upload(x);
      ops_->AddRmsNorm(device_x.as<float>(), device_y.as<float>(), device_weight.as<float>(), 1e-5F, kRowCount, kWidth,
                       out.as<float>(), reader);
      EXPECT_EQ(Download(device_x), sum);
      ExpectClose(Download(out), normed);
    };
    norm(nullptr);
    const std::vector<float> expected = forward(*linear);
    norm(linear.get());
    EXPECT_EQ(forward(*linear), expected);
    EXPECT_EQ(forward(*linear), expected) << "again, by itself";
    norm(linear.get());
    EXPECT_EQ(forward(*other), expected) << "another layer reads first";
    EXPECT_EQ(forward(*linear), expected);
    for (const float limit : {0.0F, 0.5F}) {
      const auto activate = [&](const Linear* reader) {
        ops_->ActivateMul(Activation::kSilu, limit, gate_up.as<float>(), kRowCount, kWidth, out.as<float>(), reader);
        return forward(*linear);
      };
      const std::vector<float> activated = activate(nullptr);
      EXPECT_EQ(activate(linear.get()), activated);
    }
  }
}

TEST_P(GpuOpsTest, HyperConnectionsMatchTheCpu) {
  constexpr int64_t kRowCount = 11;  // more than a block has
  for (const int streams : {1, 4, 16}) {
    for (const bool head : {false, true}) {
      const HyperConnectionShape shape{
          .streams = streams, .hidden = 70, .sinkhorn_iterations = 5, .eps = 1e-4F, .head = head};
      std::vector<float> weights = RandomValues(kRowCount * shape.Weights(), 1);
      std::vector<float> hidden = RandomValues(kRowCount * shape.Width(), 2);
      const std::vector<float> base = RandomValues(shape.Weights(), 3), scale = {0.5F, 0.7F, 0.9F};
      std::vector<float> x(static_cast<size_t>(kRowCount * shape.hidden));
      const Buffer device_weights = Upload(weights), device_hidden = Upload(hidden), device_base = Upload(base),
                   device_scale = Upload(scale), device_x = Upload(x);
      cpu_->MakeStreamWeights(shape, {.scale = scale.data(), .base = base.data()}, kRowCount, weights.data());
      ops_->MakeStreamWeights(shape, {.scale = device_scale.as<float>(), .base = device_base.as<float>()}, kRowCount,
                              device_weights.as<float>());
      ExpectClose(Download(device_weights), weights);
      cpu_->CollapseStreams(shape, hidden.data(), weights.data(), kRowCount, x.data());
      ops_->CollapseStreams(shape, device_hidden.as<float>(), device_weights.as<float>(), kRowCount,
                            device_x.as<float>());
      ExpectClose(Download(device_x), x);
      if (head) continue;
      cpu_->ExpandStreams(shape, weights.data(), x.data(), kRowCount, hidden.data());
      ops_->ExpandStreams(shape, device_weights.as<float>(), device_x.as<float>(), kRowCount,
                          device_hidden.as<float>());
      ExpectClose(Download(device_hidden), hidden);
    }
  }
}

TEST_P(GpuOpsTest, ExpertsOfTokensAndLimitsMatchTheCpu) {
  constexpr int32_t kExperts = 9, kOfToken = 2;
  constexpr int64_t kRowCount = 5;
  std::vector<float> logits = RandomValues(kRowCount * kExperts, 1);
  const std::vector<int32_t> table = {0, 3, 8, 1, 4, 5}, tokens = {2, 0, 1, 1, 2};
  const Buffer device_logits = Upload(logits), device_table = Upload(table), device_tokens = Upload(tokens);
  cpu_->KeepExperts(logits.data(), kRowCount, kExperts, tokens.data(), table.data(), kOfToken);
  ops_->KeepExperts(device_logits.as<float>(), kRowCount, kExperts, device_tokens.as<int32_t>(),
                    device_table.as<int32_t>(), kOfToken);
  EXPECT_EQ(Download(device_logits), logits);
  cpu_->CutOffAbove(logits.data(), kExperts, kRowCount, 4, 0.1F);
  ops_->CutOffAbove(device_logits.as<float>(), kExperts, kRowCount, 4, 0.1F);
  EXPECT_EQ(Download(device_logits), logits);
}

TEST_P(GpuOpsTest, RopeActivateMulAddAndGatherMatchTheCpu) {
  constexpr int64_t kRowCount = 3;
  constexpr int kHeads = 3, kHeadDim = 16, kRotary = 12;
  const int64_t width = kHeads * kHeadDim, stride = width + 5;
  const std::vector<float> x = RandomValues(kRowCount * stride, 9), table = RandomValues(20 * kRotary, 10);
  const std::vector<int64_t> positions = {19, 0, 7};
  std::vector<float> expected = x;
  for (const RopeKind kind : {RopeKind{},
                              {.interleaved = true},
                              {.interleaved = true, .inverse = true},
                              {.interleaved = true, .row_tokens = 4}}) {
    expected = x;
    cpu_->Rope(expected.data(), stride, kRowCount, kHeads, kHeadDim, kRotary, kind, table.data(), positions.data());
    const Buffer device_x = Upload(x), device_table = Upload(table), device_positions = Upload(positions);
    ops_->Rope(device_x.as<float>(), stride, kRowCount, kHeads, kHeadDim, kRotary, kind, device_table.as<float>(),
               device_positions.as<int64_t>());
    ExpectClose(Download(device_x), expected);
  }

  const int64_t half = stride / 2;
  std::vector<float> gated(static_cast<size_t>(kRowCount * half));
  const Buffer gate = Upload(x), out = Upload(gated);
  for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kSwigluOai}) {
    for (const float limit : {0.0F, 0.5F}) {
      if (limit != 0 && activation != Activation::kSilu) continue;
      cpu_->ActivateMul(activation, limit, x.data(), kRowCount, half, gated.data(), nullptr);
      gpu_->device().Fill(out.data(), 0xFF, out.bytes());
      ops_->ActivateMul(activation, limit, gate.as<float>(), kRowCount, half, out.as<float>(), nullptr);
      ExpectClose(Download(out), gated);
    }
  }

  std::vector<RowArgmax> argmaxes(kRowCount);
  expected = x;
  cpu_->Scale(expected.data(), 7.5F, std::ssize(x));
  const Buffer logits = Upload(x), device_argmaxes = Upload(argmaxes);
  ops_->Scale(logits.as<float>(), 7.5F, std::ssize(x));
  EXPECT_EQ(Download(logits), expected);
  cpu_->Softcap(expected.data(), kRowCount, stride, 3, argmaxes.data());
  ops_->Softcap(logits.as<float>(), kRowCount, stride, 3, device_argmaxes.as<RowArgmax>());
  ExpectClose(Download(logits), expected);
  const std::vector<RowArgmax> found_argmaxes = Download<RowArgmax>(device_argmaxes);
  for (size_t row = 0; row < found_argmaxes.size(); ++row) {
    EXPECT_TRUE(found_argmaxes[row].finite);
    EXPECT_EQ(found_argmaxes[row].column, argmaxes[row].column);
  }

  expected = x;
  cpu_->Add(expected.data(), x.data(), std::ssize(x));
  const Buffer sum = Upload(x);
  ops_->Add(sum.as<float>(), gate.as<float>(), std::ssize(x));
  EXPECT_EQ(Download(sum), expected);

  cpu_->AddGated(expected.data(), x.data(), x.data() + 7, kRowCount, stride);
  ops_->AddGated(sum.as<float>(), gate.as<float>(), gate.as<float>() + 7, kRowCount, stride);
  ExpectClose(Download(sum), expected);

  const Xielu xielu{.alpha_p = 0.8F, .alpha_n = 0.3F, .beta = 0.5F};
  for (const Pointwise activation :
       {Pointwise::kGelu, Pointwise::kGeluTanh, Pointwise::kXielu, Pointwise::kSquaredRelu, Pointwise::kRelu}) {
    cpu_->Activate(activation, xielu, expected.data(), std::ssize(x));
    ops_->Activate(activation, xielu, sum.as<float>(), std::ssize(x));
    ExpectClose(Download(sum), expected);
  }

  for (const GateFunction function : {GateFunction::kSigmoid, GateFunction::kSoftplus, GateFunction::kIdentity}) {
    for (const int64_t channels : {1, 2}) {
      cpu_->MulGate(function, expected.data(), stride, x.data() + 3, stride, kRowCount, width / 2 * 2, channels);
      ops_->MulGate(function, sum.as<float>(), stride, gate.as<float>() + 3, stride, kRowCount, width / 2 * 2,
                    channels);
      ExpectClose(Download(sum), expected);
    }
  }

  cpu_->ScaleColumns(expected.data() + 1, stride, kRowCount, width, 0.75F);
  ops_->ScaleColumns(sum.as<float>() + 1, stride, kRowCount, width, 0.75F);
  ExpectClose(Download(sum), expected);

  cpu_->ScaleRows(expected.data(), stride, kRowCount, width, table.data(), positions.data());
  const Buffer row_scales = Upload(table), device_positions = Upload(positions);
  ops_->ScaleRows(sum.as<float>(), stride, kRowCount, width, row_scales.as<float>(), device_positions.as<int64_t>());
  ExpectClose(Download(sum), expected);

  const std::vector<int64_t> rows = {2, 0, 2, 1};
  std::vector<float> gathered(rows.size() * static_cast<size_t>(width));
  cpu_->Gather(x.data(), width, rows.data(), std::ssize(rows), gathered.data());
  const Buffer device_rows = Upload(rows), found = Upload(std::vector<float>(gathered.size()));
  ops_->Gather(gate.as<float>(), width, device_rows.as<int64_t>(), std::ssize(rows), found.as<float>());
  EXPECT_EQ(Download(found), gathered);
}

TEST_P(GpuOpsTest, EmbeddingMatchesTheCpu) {
  const int64_t vocab = 50, width = 72;
  const std::vector<float> w = RandomValues(vocab * width, 11);
  const weights::WeightView view{w.data(), DType::kF32, vocab, width};
  const std::vector<int32_t> ids = {49, 0, 17, 17};
  const Buffer device_ids = Upload(ids);
  for (const WeightType store : kStores) {
    const auto table = ops_->MakeLinear({&view, 1}, {}, store), on_cpu = cpu_->MakeLinear({&view, 1}, {}, store);
    SCOPED_TRACE(table->Kind());
    std::vector<float> expected(ids.size() * static_cast<size_t>(width));
    cpu_->Embed(*on_cpu, 0, ids.data(), std::ssize(ids), expected.data());
    const Buffer out = Upload(std::vector<float>(expected.size()));
    ops_->Embed(*table, 0, device_ids.as<int32_t>(), std::ssize(ids), out.as<float>());
    EXPECT_EQ(Download(out), expected);
  }
}

// Each part of a table fills the rows of its ids, and the filled ones of all parts are those of the whole table.
TEST_P(GpuOpsTest, PartsOfAnEmbeddingAreTheWhole) {
  const int64_t vocab = 50, width = 72;
  const std::vector<float> w = RandomValues(vocab * width, 11);
  const std::vector<int32_t> ids = {49, 0, 17, 16, 33, 17};
  const auto rows = std::ssize(ids);
  const parallel::Partition parts{vocab, 3};
  for (kernels::Ops* ops : {ops_.get(), cpu_.get()}) {
    const bool on_gpu = ops == ops_.get();
    Device& device = ops->device();
    const auto upload = [&](const auto& values) {
      Buffer buffer = device.Allocate(values.size() * sizeof(values[0]));
      device.CopyIn(buffer.data(), values.data(), buffer.bytes());
      return buffer;
    };
    const auto download = [&](const Buffer& buffer) {
      std::vector<float> values(buffer.bytes() / sizeof(float));
      device.CopyOut(values.data(), buffer.data(), buffer.bytes());
      return values;
    };
    const Buffer device_ids = upload(ids);
    const std::vector<float> unfilled(static_cast<size_t>(rows * width), -7.0F);
    std::vector<float> all(static_cast<size_t>(rows * parts.ranks * width));
    for (int rank = 0; rank < parts.ranks; ++rank) {
      const weights::WeightView view{w.data() + parts.Begin(rank) * width, DType::kF32, parts.Size(rank), width};
      const auto table = ops->MakeLinear({&view, 1}, {}, WeightType::kF32);
      const Buffer out = upload(unfilled);
      ops->Embed(*table, parts.Begin(rank), device_ids.as<int32_t>(), rows, out.as<float>());
      const std::vector<float> part = download(out);
      for (int64_t row = 0; row < rows; ++row) {
        const auto first = part.begin() + row * width;
        std::copy(first, first + width, all.begin() + (row * parts.ranks + rank) * width);
        const bool filled = parts.RankOf(ids[static_cast<size_t>(row)]) == rank;
        EXPECT_EQ(std::all_of(first, first + width, [](float x) { return x == -7.0F; }), !filled) << on_gpu << row;
      }
    }
    const Buffer gathered = upload(all), picked = upload(unfilled);
    ops->PickParts(gathered.as<float>(), parts, device_ids.as<int32_t>(), rows, width, picked.as<float>());
    const std::vector<float> found = download(picked);
    for (int64_t row = 0; row < rows; ++row) {
      const auto expected = w.begin() + ids[static_cast<size_t>(row)] * width;
      EXPECT_TRUE(std::equal(expected, expected + width, found.begin() + row * width)) << on_gpu << row;
    }
  }
}

TEST_P(GpuOpsTest, ColumnsOfRanksAreJoined) {
  const int64_t rows = 5;
  const parallel::Partition columns{17, 3};
  const int64_t rank_stride = rows * 6;
  std::vector<float> parts(static_cast<size_t>(rank_stride * columns.ranks)), expected;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns.count; ++column) {
      const int rank = columns.RankOf(column);
      const auto value = static_cast<float>(row * 100 + column);
      parts[static_cast<size_t>(rank * rank_stride + row * columns.Size(rank) + column - columns.Begin(rank))] = value;
      expected.push_back(value);
    }
  }
  const Buffer x = Upload(parts), out = Upload(std::vector<float>(expected.size()));
  gpu_->Run(cuda::JoinColumnsOp{
      .x = x.as<float>(), .rank_stride = rank_stride, .columns = columns, .rows = rows, .out = out.as<float>()});
  EXPECT_EQ(Download(out), expected);
}

// Without a softcap, the argmaxes of values that another launch has put together.
TEST_P(GpuOpsTest, ArgmaxesWithoutSoftcap) {
  const int64_t rows = 3, width = 300;
  const std::vector<float> x = RandomValues(rows * width, 12);
  for (kernels::Ops* ops : {ops_.get(), cpu_.get()}) {
    Device& device = ops->device();
    const Buffer values = device.Allocate(x.size() * sizeof(float)), out = device.Allocate(rows * sizeof(RowArgmax));
    device.CopyIn(values.data(), x.data(), values.bytes());
    ops->Softcap(values.as<float>(), rows, width, 0, out.as<RowArgmax>());
    std::vector<float> after(x.size());
    std::vector<RowArgmax> argmaxes(rows);
    device.CopyOut(after.data(), values.data(), values.bytes());
    device.CopyOut(argmaxes.data(), out.data(), out.bytes());
    EXPECT_EQ(after, x);
    for (int64_t row = 0; row < rows; ++row) {
      const auto first = x.begin() + row * width, best = std::max_element(first, first + width);
      EXPECT_EQ(argmaxes[static_cast<size_t>(row)].column, best - first);
      EXPECT_EQ(argmaxes[static_cast<size_t>(row)].value, *best);
      EXPECT_TRUE(argmaxes[static_cast<size_t>(row)].finite);
    }
  }
}

TEST_P(GpuOpsTest, ArgmaxIsTheFirstMaximum) {
  const int64_t vocab = 700, rows = 4;
  std::vector<float> w(static_cast<size_t>(vocab * 32));
  for (int64_t token = 0; token < vocab; ++token) {  // row r's logits: a hash of token and r
    for (int64_t r = 0; r < rows; ++r)
      w[static_cast<size_t>(token * 32 + r)] = static_cast<float>((token * 37 + r * 11) % 97);
  }
  w[static_cast<size_t>(123 * 32 + 2)] = INFINITY;
  std::vector<float> x(static_cast<size_t>(rows * 32));
  for (int64_t r = 0; r < rows; ++r) x[static_cast<size_t>(r * 32 + r)] = 1;
  const weights::WeightView view{w.data(), DType::kF32, vocab, 32};
  const auto linear = ops_->MakeLinear({&view, 1}, {}, WeightType::kF32);
  const Buffer device_x = Upload(x), y = Upload(std::vector<float>(static_cast<size_t>(rows * vocab)));
  const Buffer argmaxes = Upload(std::vector<RowArgmax>(static_cast<size_t>(rows)));
  linear->Forward(device_x.as<float>(), rows, y.as<float>(), vocab, argmaxes.as<RowArgmax>());
  const std::vector<RowArgmax> found = Download<RowArgmax>(argmaxes);
  for (int64_t r = 0; r < rows; ++r) {
    // The infinite weight times zero is NaN in the other rows.
    EXPECT_FALSE(found[static_cast<size_t>(r)].finite);
  }
  w[static_cast<size_t>(123 * 32 + 2)] = 0;
  const auto finite = ops_->MakeLinear({&view, 1}, {}, WeightType::kF32);
  finite->Forward(device_x.as<float>(), rows, y.as<float>(), vocab, argmaxes.as<RowArgmax>());
  const std::vector<RowArgmax> best = Download<RowArgmax>(argmaxes);
  const std::vector<float> logits = Download(y);
  for (int64_t r = 0; r < rows; ++r) {
    const auto begin = logits.begin() + r * vocab;
    EXPECT_TRUE(best[static_cast<size_t>(r)].finite);
    EXPECT_EQ(best[static_cast<size_t>(r)].column, std::max_element(begin, begin + vocab) - begin);
    EXPECT_EQ(best[static_cast<size_t>(r)].value, *std::max_element(begin, begin + vocab));
  }
}

}  // namespace
}  // namespace kvanta::kernels
