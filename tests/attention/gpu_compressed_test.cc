// Attention to a window and to compressed entries on an emulated and, if present, a real GPU: against sums in double
// precision, the CPU's bytes of the cache, and bits that do not depend on chunks, batches and waves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/compressed_harness.h"
#include "attention/gpu_backend.h"
#include "emulated/gpus.h"

namespace kvanta::attention {
namespace {

class GpuCompressedTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  std::unique_ptr<Backend> Make(CompressedHarness& world, int64_t max_result_rows = kMaxResultRows) const {
    return MakeGpuBackend(world.pool(), world.config(), gpu_, max_result_rows);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuCompressedTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

constexpr const char* kRowFormats[] = {"bf16",
                                       "mla_int8",
#ifndef KVANTA_SANITIZED  // sanitized emulation is slow
                                       "fp32",
                                       "mla_fp8",
                                       "mla_nvfp4+exact=none+sink=0",
#endif
                                       "mla_int4+exact=none+sink=0"};

TEST_P(GpuCompressedTest, EqualsTheSums) {
  for (const auto& [row_tokens, top_k] : {std::pair(4, 0), {4, 7}, {2, 30}, {128, 0}, {32, 0}}) {
    CompressedOptions options{.heads = 18, .row_tokens = row_tokens, .top_k = top_k, .device = &gpu_->device()};
    options.lengths = {row_tokens == 128 ? 140 : 70};
    CompressedHarness world(options, 5);
    const std::unique_ptr<Backend> backend = Make(world);
    for (const int tokens : {33, 2, 1}) world.RunStep(*backend, {{0, tokens}});
    world.RunStep(*backend, {{0, options.lengths[0] - 36}});
    EXPECT_LT(LargestError(world, world.sequences()[0]), 2e-5) << row_tokens << ' ' << top_k;
  }
}

TEST_P(GpuCompressedTest, MoreEntriesThanASplit) {
  CompressedOptions options{.heads = 1, .row_tokens = 2, .lengths = {2200}, .device = &gpu_->device()};
  CompressedHarness world(options, 6);
  const std::unique_ptr<Backend> backend = Make(world);
  world.RunStep(*backend, {{0, 2190}}, /*attends=*/false);
  world.RunStep(*backend, {{0, 10}});
  EXPECT_LT(LargestError(world, world.sequences()[0], 2190), 2e-5);
}

TEST_P(GpuCompressedTest, TheCacheHasTheBytesOfTheCpus) {
  for (const char* rows : kRowFormats) {
    for (const int row_tokens : {4, 128}) {
      CompressedOptions options{.rows = rows, .keys = "mla_fp8+hadamard", .row_tokens = row_tokens};
      options.top_k = row_tokens == 4 ? 5 : 0;
      options.lengths = {270};
      CompressedHarness expected(options, 8);
      options.device = &gpu_->device();
      CompressedHarness found(options, 8);
      const std::unique_ptr<Backend> gpu = Make(found);
      const std::unique_ptr<Backend> cpu =
          MakeCpuBackend(expected.pool(), expected.config(), std::make_shared<ThreadPool>(1));
      for (const int tokens : {70, 1, 199}) {
        found.RunStep(*gpu, {{0, tokens}}, /*attends=*/false);
        expected.RunStep(*cpu, {{0, tokens}}, /*attends=*/false);
      }
      for (const int group : {0, 1}) {
        EXPECT_EQ(found.Bytes(0, group), expected.Bytes(0, group)) << rows << ' ' << row_tokens << ' ' << group;
      }
    }
  }
}

// Same sequences: token by token, and random batches of random chunks in waves of one row.
TEST_P(GpuCompressedTest, BitsDoNotDependOnChunksBatchesAndWaves) {
  uint32_t seed = 0;
  for (const char* rows : kRowFormats) {
    std::mt19937 random(++seed);
    CompressedOptions options{.rows = rows, .keys = "mla_fp8+hadamard", .device = &gpu_->device()};
    options.heads = seed % 2 == 0 ? 3 : 17;
    options.top_k = seed % 3 == 0 ? 0 : 5;
    options.lengths = {70, 22};
    SCOPED_TRACE(fmt::format("{}, top {}, heads {}", rows, options.top_k, options.heads));
    CompressedHarness one(options, seed), two(options, seed);
    const std::unique_ptr<Backend> serial = Make(one), batched = Make(two, 0);
    for (int i = 0; i < 2; ++i) {
      for (int token = 0; token < options.lengths[static_cast<size_t>(i)]; ++token) one.RunStep(*serial, {{i, 1}});
    }
    std::vector<int> left = options.lengths;
    while (left[0] + left[1] > 0) {
      Step step;
      for (int i = 0; i < 2; ++i) {
        int& tokens = left[static_cast<size_t>(i)];
        if (tokens == 0 || random() % 3 == 0) continue;
        step.push_back({i, std::uniform_int_distribution<int>(1, std::min(tokens, 40))(random)});
        tokens -= step.back().tokens;
      }
      if (!step.empty()) two.RunStep(*batched, step);
    }
    for (size_t i = 0; i < 2; ++i) {
      const auto &a = one.sequences()[i].out, &b = two.sequences()[i].out;
      ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << i;
    }
  }
}

}  // namespace
}  // namespace kvanta::attention
