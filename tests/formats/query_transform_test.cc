// Matrices of +query: products by their definition, inverses, refusals; the layouts that take the modifier.
#include "formats/query_transform.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "error_of.h"
#include "formats/cell_codec.h"
#include "formats/scheme.h"
#include "kvanta/error.h"

namespace kvanta::formats {
namespace {

using testing::HasSubstr;

// Near the identity.
std::vector<float> RandomMatrices(int kv_heads, int head_dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.3F / std::sqrt(static_cast<float>(head_dim)));
  std::vector<float> matrices(static_cast<size_t>(kv_heads * head_dim * head_dim));
  for (float& x : matrices) x = normal(random);
  for (int row = 0; row < kv_heads * head_dim; ++row)
    matrices[static_cast<size_t>(row * head_dim + row % head_dim)] += 1;
  return matrices;
}

TEST(QueryTransform, StoredKeysTimesTransformedQueriesAreTheProduct) {
  for (const int head_dim : {8, 24, 64, 96, 256}) {
    constexpr int kHeads = 2;
    const auto size = static_cast<size_t>(head_dim);
    const QueryTransform transform(RandomMatrices(kHeads, head_dim, 3), kHeads, head_dim);
    const std::vector<float> rows = RandomMatrices(1, head_dim, 4);
    for (int head = 0; head < kHeads; ++head) {
      const float* k = rows.data();
      const float* q = rows.data() + size;
      std::vector<float> y(static_cast<size_t>(MatrixStride(head_dim))), z = y;
      MultiplyRow(k, transform.KeyMatrix(head), head_dim, y.data());
      MultiplyRow(q, transform.QueryMatrix(head), head_dim, z.data());
      const float* a = transform.matrices().data() + static_cast<size_t>(head) * size * size;
      double expected = 0, found = 0, norms = 0;
      for (size_t i = 0; i < size; ++i) {
        double row = 0, magnitude = 0;
        for (size_t j = 0; j < size; ++j) {
          row += double{a[i * size + j]} * double{k[j]};
          magnitude += std::abs(double{a[i * size + j]} * double{k[j]});
        }
        ASSERT_NEAR(double{y[i]}, row, 1e-7 * head_dim * magnitude);
        expected += double{q[i]} * double{k[i]};
        found += double{z[i]} * double{y[i]};
        norms += std::abs(double{z[i]} * double{y[i]});
      }
      EXPECT_NEAR(found, expected, 1e-6 * head_dim * norms) << head_dim;
      for (size_t i = size; i < y.size(); ++i) EXPECT_EQ(y[i], 0) << "beyond the row";
    }
  }
}

TEST(QueryTransform, RefusesMatricesWithoutAnInverse) {
  const auto refusal = [](std::vector<float> matrices) {
    return ErrorOf([&] { QueryTransform(std::move(matrices), 1, 8); });
  };
  std::vector<float> matrix = RandomMatrices(1, 8, 5);
  EXPECT_EQ(refusal(matrix), "no error");
  EXPECT_THAT(refusal(std::vector<float>(64, 0.0F)), HasSubstr("singular"));
  for (size_t i = 0; i < 8; ++i) matrix[8 + i] = matrix[i] * (1 + 1e-7F);  // two rows nearly alike
  EXPECT_THAT(refusal(matrix), HasSubstr("KV head 0 is singular or nearly so"));
  matrix[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(refusal(matrix), HasSubstr("not finite"));
  matrix[3] = std::numeric_limits<float>::infinity();
  EXPECT_THAT(refusal(matrix), HasSubstr("not finite"));
  matrix.pop_back();
  EXPECT_THAT(refusal(matrix), HasSubstr("63 values"));
  std::vector<float> tiny(64, 0.0F);
  for (size_t i = 0; i < 8; ++i) tiny[9 * i] = 1e-39F;  // as well conditioned as any, but 1e39 is infinite
  EXPECT_THAT(refusal(tiny), HasSubstr("inverse of KV head 0's matrix does not fit float32 (1e+39)"));
}

TEST(QueryTransform, HashTellsMatricesApart) {
  std::vector<float> matrices = RandomMatrices(2, 8, 6);
  const QueryTransform first(matrices, 2, 8);
  EXPECT_EQ(first.Hash(), QueryTransform(matrices, 2, 8).Hash());
  EXPECT_EQ(first.Hash().size(), 22U);
  matrices[100] = std::nextafter(matrices[100], 0.0F);
  EXPECT_NE(first.Hash(), QueryTransform(matrices, 2, 8).Hash());
}

TEST(QueryTransform, NaNsLoseSignAndPayload) {
  const QueryTransform transform(RandomMatrices(1, 8, 7), 1, 8);
  const RowTransform row{.head_dim = 8, .key_matrix = transform.KeyMatrix(0)};
  std::vector<float> k(8, 1.0F), y(8);
  k[2] = -std::numeric_limits<float>::quiet_NaN();
  row.Forward(k.data(), y.data(), nullptr);
  for (const float x : y) EXPECT_EQ(std::bit_cast<uint32_t>(x), 0x7fc00000U);
}

TEST(QueryTransform, LayoutsThatTakeIt) {
  const auto refusal = [](const char* scheme, LayerShape shape = {2, 64}) {
    return ErrorOf([&] { PlanCache({KvScheme::Parse(scheme)}, {shape}, 64); });
  };
  for (const char* scheme : {"int4+query", "k=int5_g32+query,v=int4", "int3_g32+query", "int4+query+outliers=4",
                             "int4+query+exact=2+sink=3", "k=kivi4+hadamard+query,v=fp8"}) {
    EXPECT_EQ(refusal(scheme), "no error") << scheme;
  }
  EXPECT_THAT(refusal("int4+query+sink=0"), HasSubstr("+query needs an exact first page"));
  EXPECT_THAT(refusal("int8+query"), HasSubstr("+exact=open"));
  EXPECT_THAT(refusal("fp8+query+exact=open"), HasSubstr("add +hadamard to K"));
  EXPECT_THAT(refusal("int4-hadamard+query"), HasSubstr("add +hadamard to K"));
  EXPECT_THAT(refusal("fp8+hadamard+query+exact=open"), HasSubstr("static scales of fp8_e4m3"));
  EXPECT_THAT(refusal("int4+mean+query"), HasSubstr("leave +mean out"));
  EXPECT_THAT(refusal("mla_int4+query", {1, 64, 16}), HasSubstr("latents (MLA)"));
  const CacheLayout layout = PlanCache({KvScheme::Parse("int4+query")}, {{2, 64}}, 64);
  EXPECT_TRUE(layout.UsesScales());
  EXPECT_THAT(layout.Identity(), HasSubstr("int4+query"));
  EXPECT_EQ(layout.page_bytes, PlanCache({KvScheme::Parse("int4")}, {{2, 64}}, 64).page_bytes);
}

TEST(QueryTransform, CellsRoundTrip) {
  constexpr CellShape kShape = {.tokens = 32, .head_dim = 32};
  const QueryTransform transform(RandomMatrices(1, 32, 8), 1, 32);
  const std::vector<float> mean(32, 3.0F);
  std::vector<float> x = RandomMatrices(1, 32, 9);
  CellParameters parameters{.mean = mean, .query = &transform};
  const KvScheme scheme = KvScheme::Parse("k=fp32+hadamard+query,v=bf16+exact=open");
  const auto bytes = EncodeCell(scheme, SideKind::kK, x, kShape, parameters);
  const std::vector<float> decoded = DecodeCell(scheme, SideKind::kK, bytes, kShape, parameters);
  for (size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(decoded[i], x[i], 1e-3);
  const auto refusal = [&](const CellParameters& wrong) {
    return ErrorOf([&] { EncodeCell(scheme, SideKind::kK, x, kShape, wrong); });
  };
  EXPECT_THAT(refusal({.mean = mean}), HasSubstr("give its matrix and the mean"));
  EXPECT_THAT(refusal({.query = &transform}), HasSubstr("give its matrix and the mean"));
  const QueryTransform other(RandomMatrices(2, 32, 8), 2, 32);
  EXPECT_THAT(refusal({.mean = mean, .query = &other}), HasSubstr("for one head"));
}

}  // namespace
}  // namespace kvanta::formats
