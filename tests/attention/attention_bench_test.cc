// The benchmark of attention: what it measures is verified, and adds up.
#include "bench/attention_bench.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/attention/cpu/table.h"
#include "kernels/cpu/select.h"
#include "kvanta/error.h"
#include "tolerance.h"

namespace kvanta::attention {
namespace {

TEST(AttentionBenchTest, VerifiesAndReports) {
  size_t measured = 0;
  const std::vector<AttentionBenchRow> rows = RunAttentionBench({.formats = {"bf16", "int4"},
                                                                 .threads = {1, 2},
                                                                 .heads = 4,
                                                                 .kv_heads = 2,
                                                                 .head_dim = 64,
                                                                 .context = 4100,
                                                                 .query_tokens = 3,
                                                                 .seconds = 0},
                                                                [&] { ++measured; });
  ASSERT_EQ(rows.size(), 4u);
  EXPECT_EQ(measured, rows.size());
  const bool has_bf16_operands = kernels::SelectIsa("auto").attention->bf16_operands == DType::kBf16;
  const double floats = has_bf16_operands ? testing::kUnitBf16 : 1e-3;
  for (const AttentionBenchRow& row : rows) {
    EXPECT_GT(row.ns_min, 0);
    EXPECT_LE(row.ns_min, row.ns_median);
    EXPECT_LT(row.max_error, row.format == "int4" ? 5e-2 : floats);  // int4: 8-bit operands
    EXPECT_NEAR(row.gb_s, static_cast<double>(row.bytes) / row.ns_median, 1e-9 * row.gb_s);
    EXPECT_NEAR(row.share_of_limit * row.ns_median, std::max(row.memory_ns, row.dot_ns), 1e-6 * row.ns_median);
    EXPECT_GT(std::min({row.memory_ns, row.dot_ns, row.in_cache_ns}), 0);
    EXPECT_NEAR(row.times_bf16 * row.ns_median, row.bf16_ns, 1e-6 * row.bf16_ns);
  }
  EXPECT_EQ(rows[0].bytes, int64_t{4103} * 2 * 64 * 2 * 2);
  EXPECT_NEAR(rows[0].gelem_s * rows[0].ns_median, 2.0 * (4101 + 4102 + 4103) * 2 * 64, 1);
  EXPECT_LT(rows[2].dot_ns, rows[0].dot_ns);
  EXPECT_THROW(RunAttentionBench({.formats = {"fp32"}, .context = int64_t{1} << 32}), ResourceError);
  EXPECT_THROW(RunAttentionBench({.formats = {"fp32"}, .threads = {0}}), InputError);
  EXPECT_THROW(RunAttentionBench({.formats = {"fp32"}, .layers = 0}), InputError);
  EXPECT_THROW(RunAttentionBench({.formats = {"fp32"}, .seconds = INFINITY}), InputError);
  EXPECT_THROW(RunAttentionBench({.formats = {"fp32"}, .seconds = NAN}), InputError);
}

TEST(AttentionBenchTest, HasWhatCalibrationGives) {
  const std::vector<std::string> formats = {"int4+mean", "int8+outliers=4", "int4+query", "t3+query",
                                            "klt3",      "k=klt2,v=int4"};
  const std::vector<AttentionBenchRow> rows =
      RunAttentionBench({.formats = formats, .heads = 4, .kv_heads = 2, .head_dim = 64, .context = 4100, .seconds = 0});
  ASSERT_EQ(rows.size(), formats.size());
  for (const AttentionBenchRow& row : rows) {
    EXPECT_GT(row.max_error, 0) << row.format;
    EXPECT_LT(row.max_error, 5e-2) << row.format;
  }
}

// A run is over one layer, however many a page holds; the benchmark compares the layers' results.
TEST(AttentionBenchTest, TakesLayersInTurn) {
  const AttentionBenchRow row =
      RunAttentionBench({.heads = 4, .kv_heads = 2, .head_dim = 64, .layers = 3, .context = 4100, .seconds = 0})
          .front();
  EXPECT_EQ(row.bytes, int64_t{4101} * 2 * 64 * 2 * 2);
}

}  // namespace
}  // namespace kvanta::attention
