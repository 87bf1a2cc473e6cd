// Gated MLPs by one launch: the bits of a product, its activation and the packing of what is read next, each by itself.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "emulated/guarded_device.h"
#include "kernels/gpu_and_cpu.h"
#include "kernels/random_values.h"

namespace kvanta::kernels {
namespace {

class GpuGatedLinearTest : public testing::GpuAndCpuTest {
 protected:
  std::unique_ptr<Linear> Make(int64_t out, int64_t in, WeightType store, uint32_t seed, bool has_bias) {
    const std::vector<float> w = RandomValues(out * in, seed), bias = RandomValues(has_bias ? out : 0, seed + 1);
    const weights::WeightView view{w.data(), DType::kF32, out, in};
    return ops_->MakeLinear({&view, 1}, bias, store);
  }
  int64_t Launches() const {
    return emulated_ ? dynamic_cast<const testing::GuardedDevice&>(gpu_->device()).Launches() : 0;
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuGatedLinearTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

struct GatedCase {
  int64_t rows, width;
  WeightType gate_up, down;
  int launches;  // of gates, what they multiply, and the product that reads them
  Activation activation = Activation::kSilu;
  float limit = 0;
  bool has_reader = true;
};

TEST_P(GpuGatedLinearTest, HasTheBitsOfSingleOperations) {
  constexpr int64_t kIn = 200, kOut = 24;
  constexpr WeightType kBf16 = WeightType::kBf16, kInt4 = WeightType::kInt4;
  [[maybe_unused]] constexpr WeightType kInt8 = WeightType::kInt8;  // not in sanitized builds
  const std::vector<GatedCase> cases = {
      {1, 96, kBf16, kBf16, 3},
      {8, 96, kInt4, kBf16, 3, Activation::kGeluTanh},
      {9, 160, kBf16, kBf16, 3, Activation::kSwigluOai},
#ifndef KVANTA_SANITIZED
      {40, 96, kInt8, kBf16, 3, Activation::kSilu, 0.3F},
      {60, 224, kBf16, kBf16, 3},
      {60, 240, kBf16, kBf16, 4},   // a tile of more panels than are left; not whole units: packed by the product
      {100, 224, kBf16, kBf16, 4},  // the largest tiles have no gates
      {3, 80, kBf16, kBf16, 3},
      {3, 72, kBf16, kBf16, 4},  // not whole panels
      {5, 96, WeightType::kF16, kInt8, 3},
      {9, 96, kBf16, kInt4, 4},
      {1, 112, kInt4, kInt4, 3},            // with a scale of the row
      {2, 96, WeightType::kF32, kBf16, 3},  // activated by an operation of its own, which packs
      {300, 96, kBf16, kBf16, 4},           // more rows than are packed by parts
      {3, 96, kBf16, kBf16, 4, Activation::kSilu, 0, false},
#endif
  };
  for (const auto& [rows, width, gate_up, down, launches, activation, limit, has_reader] : cases) {
    SCOPED_TRACE(fmt::format("{} rows of {}", rows, width));
    const auto gates = Make(2 * width, kIn, gate_up, 7, true), reader = Make(kOut, width, down, 9, false);
    const Buffer x = Upload(RandomValues(rows * kIn, 5));
    const Buffer both = Upload(std::vector<float>(static_cast<size_t>(rows * 2 * width), -7.0F));
    const Buffer gated = Upload(std::vector<float>(static_cast<size_t>(rows * width), -7.0F));
    const Buffer out = Upload(std::vector<float>(static_cast<size_t>(rows * kOut), -7.0F));
    const auto read = [&, count = rows] {
      reader->Forward(gated.as<float>(), count, out.as<float>(), kOut);
      return Download(out);
    };
    gates->Forward(x.as<float>(), rows, both.as<float>(), 2 * width);
    ops_->ActivateMul(activation, limit, both.as<float>(), rows, width, gated.as<float>(), nullptr);
    const std::vector<float> expected = read();
    for (int again = 0; again < 3; ++again) {  // in each order of blocks
      gpu_->device().Fill(gated.data(), 0xFF, gated.bytes());
      const int64_t first = Launches();
      ops_->ForwardGated(*gates, x.as<float>(), rows, activation, limit, both.as<float>(), gated.as<float>(),
                         has_reader ? reader.get() : nullptr);
      EXPECT_EQ(read(), expected);
      if (emulated_ && gate_up != WeightType::kF32 && rows < 200) {
        EXPECT_EQ(Launches() - first, launches);
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::kernels
