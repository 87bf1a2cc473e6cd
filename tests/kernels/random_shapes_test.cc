// Linear layers of random shapes, kinds, biases and thread counts: every row has the bits that it has alone, and the
// sum of its terms in doubles where W is stored as elements. No access is beyond the ends of x, y and the bias, which
// lie before a page without access.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/math.h"
#include "emulated/units.h"
#include "kernels/block_matrix.h"
#include "kernels/ops.h"
#include "kernels/random_values.h"
#include "tolerance.h"

namespace kvanta::kernels {
namespace {

using kvanta::testing::AllUnits;
using kvanta::testing::DotTolerance;
using kvanta::testing::Unit;

// Floats that end at a page without access.
class GuardedFloats {
 public:
  explicit GuardedFloats(size_t count) : bytes_(Pages(count) + kPage) {
    base_ = static_cast<uint8_t*>(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + bytes_ - kPage, kPage, PROT_NONE) != 0) throw std::bad_alloc();
    values_ = {reinterpret_cast<float*>(base_ + bytes_ - kPage) - count, count};
  }
  explicit GuardedFloats(std::span<const float> values) : GuardedFloats(values.size()) {
    std::ranges::copy(values, values_.begin());
  }
  ~GuardedFloats() { munmap(base_, bytes_); }
  GuardedFloats(const GuardedFloats&) = delete;
  GuardedFloats& operator=(const GuardedFloats&) = delete;

  std::span<float> Get() const { return values_; }
  float* Row(int64_t row, int64_t stride) const { return values_.data() + row * stride; }

 private:
  static constexpr size_t kPage = 4096;
  static size_t Pages(size_t count) { return static_cast<size_t>(RoundUp(static_cast<int64_t>(count) * 4, kPage)); }

  size_t bytes_;
  uint8_t* base_;
  std::span<float> values_;
};

// A layer of random shape. Sizes are as often small as next to multiples of tiles and blocks.
struct RandomLayer {
  RandomLayer(const Unit& unit, uint32_t seed) : generator(seed) {
    in = Size(1300);
    out = Size(150);
    rows = Below(2) == 0 ? 1 + Below(7) : 1 + Below(150);
    kind.int16_activations = Below(2) == 0;
    ops = MakeCpuOps(std::make_shared<ThreadPool>(1 + Below(3)), *unit.table);
    constexpr WeightType kTypes[] = {WeightType::kF32, WeightType::kBf16, WeightType::kF16, WeightType::kInt8,
                                     WeightType::kInt4};
    const int type = Below(10);
    kind.weights = type < 5 ? kTypes[type] : WeightType::kStored;
    if (kind.weights == WeightType::kStored)
      format = static_cast<weights::BlockFormat>(1 + Below(weights::kBlockFormats - 1));
    in = RoundUp(in, weights::BlockWeights(format));
    if (Below(2) == 0) bias = std::make_unique<GuardedFloats>(RandomValues(out, generator()));
    const std::span<const float> of_bias = bias ? bias->Get() : std::span<float>();
    if (kind.weights == WeightType::kStored) {
      const BlockMatrix w = RandomBlocks(out, in, format, generator());
      const weights::WeightView view = w.View();
      linear = ops->MakeLinear({&view, 1}, of_bias, kind);
    } else {
      const std::vector<float> w = RandomValues(out * in, generator());
      const weights::WeightView view{w.data(), DType::kF32, out, in};
      linear = ops->MakeLinear({&view, 1}, of_bias, kind);
    }
  }

  int Below(int limit) { return static_cast<int>(generator() % static_cast<uint32_t>(limit)); }
  int64_t Size(int limit) {
    if (Below(3) == 0) return 1 + Below(40);
    const int size = 1 + Below(limit);
    return Below(2) == 0 ? size : std::max<int64_t>(1, RoundUp(size, 32) + Below(3) - 1);
  }
  bool IsElements() const {
    return kind.weights == WeightType::kF32 || kind.weights == WeightType::kBf16 || kind.weights == WeightType::kF16;
  }

  std::mt19937 generator;
  int64_t in, out, rows;
  LinearKind kind = WeightType::kF32;
  weights::BlockFormat format = weights::BlockFormat::kNone;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<GuardedFloats> bias;
  std::unique_ptr<Linear> linear;
};

void ExpectRow(const RandomLayer& layer, std::span<const float> x, const float* y) {
  std::vector<float> w(static_cast<size_t>(layer.in));
  for (int64_t column = 0; column < layer.out; ++column) {
    layer.linear->DequantizeRow(column, w.data());
    double sum = layer.bias ? layer.bias->Get()[static_cast<size_t>(column)] : 0.0F;
    double magnitude = std::abs(sum);
    for (size_t k = 0; k < w.size(); ++k) {
      const float value = layer.kind.weights == WeightType::kBf16 ? Bf16ToFloat(FloatToBf16(x[k])) : x[k];
      sum += double{value} * w[k];
      magnitude += std::abs(double{value} * w[k]);
    }
    ASSERT_NEAR(y[column], sum, DotTolerance(layer.in, magnitude)) << column;
  }
}

class RandomShapesTest : public ::testing::TestWithParam<Unit> {};

TEST_P(RandomShapesTest, RowsHaveTheBitsThatTheyHaveAlone) {
#ifdef KVANTA_SANITIZED
  constexpr uint32_t kLayers = 10;
#else
  constexpr uint32_t kLayers = 150;
#endif
  for (uint32_t seed = 1; seed <= kLayers; ++seed) {
    RandomLayer layer(GetParam(), seed);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ": " << layer.linear->Kind() << " in " << layer.in
                                      << " out " << layer.out << " rows " << layer.rows);
    const int64_t stride = layer.out + layer.Below(5);
    const GuardedFloats x(RandomValues(layer.rows * layer.in, seed)), alone(static_cast<size_t>(layer.out));
    const GuardedFloats y(static_cast<size_t>((layer.rows - 1) * stride + layer.out));
    std::ranges::fill(y.Get(), -77.0F);
    std::vector<RowArgmax> argmaxes(static_cast<size_t>(layer.rows));
    layer.linear->Forward(x.Get().data(), layer.rows, y.Get().data(), stride, argmaxes.data());
    for (int64_t row = 0; row < layer.rows; ++row) {
      const float* result = y.Row(row, stride);
      const GuardedFloats own({x.Row(row, layer.in), static_cast<size_t>(layer.in)});
      layer.linear->Forward(own.Get().data(), 1, alone.Get().data(), layer.out);
      ASSERT_EQ(std::memcmp(alone.Get().data(), result, alone.Get().size_bytes()), 0) << "row " << row;
      const RowArgmax& argmax = argmaxes[static_cast<size_t>(row)];
      ASSERT_TRUE(argmax.finite);
      ASSERT_EQ(argmax.column, std::max_element(result, result + layer.out) - result) << "row " << row;
      for (int64_t column = layer.out; row + 1 < layer.rows && column < stride; ++column) {
        ASSERT_EQ(result[column], -77.0F) << "row " << row;
      }
      if (layer.IsElements() && row % 40 == 0) ExpectRow(layer, own.Get(), result);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Units, RandomShapesTest, ::testing::ValuesIn(AllUnits()),
                         [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace kvanta::kernels
