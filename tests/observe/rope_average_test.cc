// The closed form against rows that are turned to every position one by one, as the model's tables turn them.
#include "observe/rope_average.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "models/blocks/rope.h"

namespace kvanta::observe {
namespace {

using models::RopeSpec;
using models::RopeType;

constexpr int kDim = 24;
constexpr int kRows = 5;

struct Sums {
  std::vector<double> sum = std::vector<double>(kDim);
  std::vector<double> moment = std::vector<double>(kDim * kDim);

  void Add(const double* row, double weight) {
    for (int i = 0; i < kDim; ++i) {
      sum[static_cast<size_t>(i)] += weight * row[i];
      for (int j = 0; j < kDim; ++j) moment[static_cast<size_t>(i * kDim + j)] += weight * row[i] * row[j];
    }
  }
};

std::vector<double> Turned(const RopeSpec& rope, const double* row, const float* cos_sin) {
  std::vector<double> turned(row, row + kDim);
  const int pairs = rope.rotary_dim / 2;
  for (int i = 0; i < pairs; ++i) {
    const auto low = static_cast<size_t>(rope.interleaved ? 2 * i : i);
    const auto high = static_cast<size_t>(rope.interleaved ? 2 * i + 1 : i + pairs);
    const double cos = cos_sin[i], sin = cos_sin[pairs + i];
    turned[low] = row[low] * cos - row[high] * sin;
    turned[high] = row[high] * cos + row[low] * sin;
  }
  return turned;
}

// cos | sin of the positions of a context, without the scale of yarn and longrope.
std::vector<float> Table(const RopeSpec& rope, int64_t length) {
  models::RopeFrequencies frequencies = MakeRopeFrequencies(rope, length);
  frequencies.attention_scaling = 1;
  std::vector<float> table(static_cast<size_t>(length * rope.rotary_dim));
  FillRopeTable(frequencies, table);
  return table;
}

std::vector<RopeSpec> Ropes() {
  RopeSpec rope{.rotary_dim = kDim, .theta = 100, .original_max_position = 64};
  std::vector<RopeSpec> ropes = {rope};
  rope.interleaved = true;
  ropes.push_back(rope);
  rope.rotary_dim = 16;
  ropes.push_back(rope);
  rope.interleaved = false;
  ropes.push_back(rope);
  rope.factor = 4;
  for (const RopeType type : {RopeType::kLinear, RopeType::kLlama3, RopeType::kYarn, RopeType::kLongRope}) {
    rope.type = type;
    rope.short_factor.assign(8, 1.5F);
    rope.long_factor.assign(8, 3.0F);  // for contexts above 64
    ropes.push_back(rope);
  }
  rope.rotary_dim = 0;
  ropes.push_back(rope);
  return ropes;
}

TEST(RopeAverage, IsThatOfRowsTurnedToEveryPosition) {
  const std::vector<int64_t> lengths = {48, 1, 200};
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0.5, 1);
  for (const RopeSpec& rope : Ropes()) {
    SCOPED_TRACE("rotary_dim " + std::to_string(rope.rotary_dim) + ", type " +
                 std::to_string(static_cast<int>(rope.type)) + (rope.interleaved ? ", interleaved" : ""));
    const RopeAverage average(rope, kDim, lengths, kRows, kRows);
    std::vector<double> rows(kRows * kDim);
    for (double& x : rows) x = normal(random);
    Sums expected, found;
    const std::vector<float> own = Table(rope, kRows);
    for (int row = 0; row < kRows; ++row) {
      const double* before = rows.data() + row * kDim;
      for (const int64_t length : lengths) {
        const std::vector<float> table = Table(rope, length);
        for (int64_t position = 0; position < length; ++position) {
          expected.Add(Turned(rope, before, table.data() + position * rope.rotary_dim).data(),
                       1.0 / static_cast<double>(3 * length));
        }
      }
      std::vector<double> undone = Turned(rope, before, own.data() + row * rope.rotary_dim);
      average.Undo(row, undone.data());
      for (int i = 0; i < kDim; ++i) ASSERT_NEAR(undone[static_cast<size_t>(i)], before[i], 1e-6);
      found.Add(undone.data(), 1);
    }
    average.AverageSum(found.sum.data());
    average.AverageMoment(found.moment.data());
    // The tables are f32, and round angles of up to 200 radians to some 1e-5.
    for (size_t i = 0; i < expected.sum.size(); ++i) ASSERT_NEAR(found.sum[i], expected.sum[i], 2e-4) << i;
    for (size_t i = 0; i < expected.moment.size(); ++i) ASSERT_NEAR(found.moment[i], expected.moment[i], 1e-3) << i;
    for (size_t i = 0; i < kDim; ++i) {
      for (size_t j = 0; j < i; ++j) ASSERT_EQ(found.moment[i * kDim + j], found.moment[j * kDim + i]);
    }
  }
}

TEST(RopeAverage, TheFirstPositionTurnsNothing) {
  const RopeSpec rope{.rotary_dim = kDim, .theta = 100, .original_max_position = 64};
  const std::vector<int64_t> first = {1};
  const RopeAverage average(rope, kDim, first, 1, 1);
  Sums sums;
  const std::vector<double> row(kDim, 1.0);
  sums.Add(row.data(), 1);
  const Sums before = sums;
  average.AverageSum(sums.sum.data());
  average.AverageMoment(sums.moment.data());
  EXPECT_EQ(sums.sum, before.sum);
  EXPECT_EQ(sums.moment, before.moment);
}

}  // namespace
}  // namespace kvanta::observe
