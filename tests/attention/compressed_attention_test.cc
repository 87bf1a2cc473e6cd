// Attention to a window and to compressed entries: against sums in double precision, and bit for bit over chunks,
// batches and threads.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "attention/compressed_harness.h"
#include "attention/reference_backend.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

class CompressedAttentionTest : public ::testing::TestWithParam<testing::Unit> {};

INSTANTIATE_TEST_SUITE_P(Units, CompressedAttentionTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& param) { return std::string(param.param.name); });

TEST_P(CompressedAttentionTest, EqualsTheSums) {
  for (const auto& [row_tokens, top_k] : {std::pair(4, 0), {4, 7}, {2, 30}, {64, 0}, {128, 0}, {32, 0}}) {
    CompressedOptions options{.row_tokens = row_tokens, .top_k = top_k};
    options.lengths = {row_tokens == 128 ? 300 : 150};
    CompressedHarness world(options, 5);
    const std::unique_ptr<Backend> backend = world.CpuBackend(*GetParam().table, 2);
    for (const int tokens : {63, 2, 1, 60}) world.RunStep(*backend, {{0, tokens}});
    world.RunStep(*backend, {{0, options.lengths[0] - 126}});
    EXPECT_LT(LargestError(world, world.sequences()[0]), 1e-5) << row_tokens << ' ' << top_k;
  }
}

TEST_P(CompressedAttentionTest, MoreEntriesThanASplit) {
  CompressedOptions options{.heads = 1, .row_tokens = 2, .lengths = {2200}};
  CompressedHarness world(options, 6);
  const std::unique_ptr<Backend> backend = world.CpuBackend(*GetParam().table, 2);
  world.RunStep(*backend, {{0, 2200}});
  EXPECT_LT(LargestError(world, world.sequences()[0]), 1e-5);
}

TEST_P(CompressedAttentionTest, BitsDoNotDependOnChunksBatchesAndThreads) {
  for (const char* rows :
       {"fp32", "bf16", "mla_fp8", "mla_int8", "mla_int4+exact=none+sink=0", "mla_nvfp4+exact=none+sink=0"}) {
    for (const int top_k : {0, 5}) {
      CompressedOptions options{.rows = rows, .keys = "mla_fp8+hadamard", .top_k = top_k};
      options.lengths = {150, 70, 33};
      CompressedHarness one(options, 7), two(options, 7);
      const std::unique_ptr<Backend> serial = one.CpuBackend(*GetParam().table),
                                     parallel = two.CpuBackend(*GetParam().table, 3);
      for (int i = 0; i < 3; ++i) {
        for (int token = 0; token < options.lengths[static_cast<size_t>(i)]; ++token) one.RunStep(*serial, {{i, 1}});
      }
      two.RunStep(*parallel, {{2, 30}, {0, 65}});
      two.RunStep(*parallel, {{0, 1}, {1, 70}, {2, 3}});
      two.RunStep(*parallel, {{0, 80}});
      for (int token = 0; token < 4; ++token) two.RunStep(*parallel, {{0, 1}});  // threads divide the heads
      for (size_t i = 0; i < 3; ++i) {
        const auto &a = one.sequences()[i].out, &b = two.sequences()[i].out;
        ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << rows << ' ' << top_k << ' ' << i;
      }
    }
  }
}

TEST(CompressedAttention, TheReferenceRefusesIt) {
  CompressedHarness world({}, 1);
  EXPECT_THROW(MakeReferenceBackend(world.pool(), world.config()), InputError);
}

TEST(CompressedAttention, EntriesHaveTheFormatOfTheirLayer) {
  const KvScheme rows = KvScheme::Parse("bf16"), entries = KvScheme::Parse("fp32");
  const formats::CacheLayout layout =
      formats::PlanCache({rows, entries},
                         {{.kv_heads = 1, .head_dim = 32, .shared_kv = true},
                          {.kv_heads = 1, .head_dim = 32, .shared_kv = true, .row_tokens = 4}},
                         64, {0, 1});
  CompressedHarness world({}, 1);
  cache::PagePool pool(Cpu(), layout, {.budget_bytes = 1 << 20});
  EXPECT_THROW(MakeCpuBackend(pool, world.config(), std::make_shared<ThreadPool>(1)), InputError);
}

}  // namespace
}  // namespace kvanta::attention
