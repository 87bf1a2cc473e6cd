#include "weights/weight_view.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace kvanta::weights {
namespace {

constexpr int64_t kIn = 64;

TEST(WeightView, RowsInPairs) {
  const WeightView view{.out = 8, .in = 1, .interleaved_heads = 2};
  std::vector<int64_t> stored;
  for (int64_t row = 0; row < 8; ++row) stored.push_back(view.StoredRow(row));
  EXPECT_EQ(stored, (std::vector<int64_t>{0, 2, 1, 3, 4, 6, 5, 7}));

  const WeightView latent{.out = 12, .in = 1, .interleaved_heads = 2, .interleaved_first = 2};
  stored.clear();
  for (int64_t row = 0; row < 12; ++row) stored.push_back(latent.StoredRow(row));
  EXPECT_EQ(stored, (std::vector<int64_t>{0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11}));
}

TEST(WeightView, ReadsUnalignedElements) {
  std::vector<uint8_t> bytes(1 + 4 * kIn);
  std::vector<float> values(kIn), read(kIn);
  std::iota(values.begin(), values.end(), 0.5F);
  std::memcpy(bytes.data() + 1, values.data(), 4 * kIn);
  ReadWeightRow({.data = bytes.data() + 1, .dtype = DType::kF32, .out = 1, .in = kIn}, 0, read.data());
  EXPECT_EQ(read, values);
}

}  // namespace
}  // namespace kvanta::weights
