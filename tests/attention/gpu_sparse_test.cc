// Sparse attention on an emulated and, if present, a real GPU: the reference's choices and results, and bits that do
// not depend on chunks, batches and waves.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/gpu_backend.h"
#include "attention/sparse_harness.h"
#include "emulated/gpus.h"

namespace kvanta::attention {
namespace {

struct SparseFormats {
  std::string latents, keys;
};
const SparseFormats kSparseFormats[] = {{"bf16", "bf16"},
                                        {"mla_fp8", "mla_fp8+hadamard"},
#ifndef KVANTA_SANITIZED  // sanitized emulation is slow
                                        {"fp32", "fp32"},
                                        {"mla_nvfp4", "mla_nvfp4+hadamard"},
                                        {"mla_int8", "mla_int8"},
#endif
                                        {"mla_int4+exact=2+sink=2", "mla_int4+hadamard+exact=2"}};

class GpuSparseTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  SparseOptions On(const SparseFormats& formats) const {
    return {.latents = formats.latents, .keys = formats.keys, .device = &gpu_->device()};
  }
  std::unique_ptr<Backend> Make(SparseHarness& world, int64_t max_result_rows = kMaxResultRows,
                                bool makes_groups = true) const {
    return MakeGpuBackend(world.pool(), world.config(), gpu_, max_result_rows, makes_groups);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuSparseTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

TEST_P(GpuSparseTest, ChoosesAndAttendsAsTheReference) {
  for (const SparseFormats& formats : kSparseFormats) {
    SCOPED_TRACE(formats.latents);
    SparseOptions options = On(formats);
    options.heads = 18;
    options.index_heads = 18;
    options.lengths = {90};
    SparseHarness world(options, 3);
    const std::unique_ptr<Backend> backend = Make(world);
    options.device = &Cpu();
    SparseHarness expected(options, 3);
    const std::unique_ptr<Backend> reference = expected.Reference();
    for (const int tokens : {33, 1, 31, 25}) {
      world.RunStep(*backend, {{0, tokens}});
      expected.RunStep(*reference, {{0, tokens}});
    }
    const auto& found = world.sequences()[0];
    const auto& sequence = expected.sequences()[0];
    const int width = options.heads * options.rank;
    int same = 0;
    double largest = 0, error = 0;
    for (size_t row = 0; row < 90; ++row) {
      ASSERT_EQ(found.chosen[row].size(), row < 16 ? 0U : 16U) << row;
      ASSERT_EQ(sequence.chosen[row].size(), found.chosen[row].size());
      if (found.chosen[row] != sequence.chosen[row]) continue;  // scores that differ by less than their rounding
      ++same;
      for (size_t i = row * static_cast<size_t>(width); i < (row + 1) * static_cast<size_t>(width); ++i) {
        largest = std::max(largest, std::abs(double{sequence.out[i]}));
        error = std::max(error, std::abs(double{sequence.out[i]} - double{found.out[i]}));
      }
    }
    EXPECT_GE(same, options.keys == "fp32" ? 90 : 85);
    EXPECT_LT(error, (options.latents == "fp32" ? 1e-5 : 4e-3) * largest);
  }
}

// Tiles of a token's heads, which read the same copies.
TEST_P(GpuSparseTest, TileGroupsHaveTheBitsOfSingleTiles) {
  const std::vector<SparseFormats> cases = {
      {"mla_int4+exact=2+sink=1", "mla_int4+hadamard+exact=2"},
#ifndef KVANTA_SANITIZED
      {"mla_fp8", "mla_fp8+hadamard"},
#endif
  };
  for (const SparseFormats& formats : cases) {
    SCOPED_TRACE(formats.latents);
    SparseOptions options = On(formats);
    options.page_size = 32;
    options.heads = 80;  // a group of four tiles, and one tile
    options.rank = 512;
    options.rope_dim = 64;
    options.top_k = 270;
    options.lengths = {275};
    SparseHarness one(options, 5), two(options, 5);
    const std::unique_ptr<Backend> groups = Make(one), single = Make(two, 0, false);
    for (const int tokens : {266, 7, 1}) {
      const bool attends = tokens < 10;
      one.RunStep(*groups, {{0, tokens}}, attends);
      two.RunStep(*single, {{0, tokens}}, attends);
    }
    gpu_->device().Synchronize();
    const std::vector<float>&a = one.sequences()[0].out, &b = two.sequences()[0].out;
    const auto first = static_cast<size_t>(266 * options.heads * options.rank);
    ASSERT_EQ(std::memcmp(a.data() + first, b.data() + first, (a.size() - first) * sizeof(float)), 0);
    ASSERT_EQ(one.sequences()[0].chosen[272].size(), 270U);
  }
}

// Same sequences: token by token, and random batches of random chunks in waves of one row, with serial KV splits.
TEST_P(GpuSparseTest, BitsDoNotDependOnChunksBatchesAndWaves) {
  uint32_t seed = 0;
  for (const SparseFormats& formats : kSparseFormats) {
    std::mt19937 random(++seed);
    const auto pick = [&](std::initializer_list<int> values) {
      return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random)];
    };
    SparseOptions options = On(formats);
    options.page_size = pick({16, 32, 64});
    options.top_k = pick({1, 7, 16, 33});
    options.heads = pick({1, 3, 17});
    options.index_heads = pick({1, 4, 18});
    options.lengths = {pick({61, 80}), pick({1, 17, 40})};
    SCOPED_TRACE(fmt::format("{}, page {}, top {}, heads {}, {}", formats.latents, options.page_size, options.top_k,
                             options.heads, options.index_heads));
    SparseHarness one(options, seed), two(options, seed);
    const std::unique_ptr<Backend> serial = Make(one), batched = Make(two, 0);
    ExpectSameBitsInBatches(options.lengths, one, *serial, two, *batched, random);
    if (HasFatalFailure()) return;
  }
}

// More tokens than a split has: of scores, and of copies.
TEST_P(GpuSparseTest, LongContext) {
  SparseOptions options = On({"mla_int4+exact=2+sink=2", "mla_fp8+hadamard"});
  options.page_size = 64;
  options.top_k = 1100;
  options.lengths = {1310};
  SparseHarness one(options, 9), two(options, 9);
  options.device = &Cpu();
  SparseHarness expected(options, 9);
  const std::unique_ptr<Backend> serial = Make(one), batched = Make(two, 0), reference = expected.Reference();
  one.RunStep(*serial, {{0, 1308}}, false);
  two.RunStep(*batched, {{0, 1308}}, false);
  expected.RunStep(*reference, {{0, 1308}}, false);
  for (int token = 0; token < 2; ++token) one.RunStep(*serial, {{0, 1}});
  two.RunStep(*batched, {{0, 2}});
  expected.RunStep(*reference, {{0, 2}});
  const auto &a = one.sequences()[0], &b = two.sequences()[0];
  for (size_t row = 1308; row < 1310; ++row) {
    ASSERT_EQ(a.chosen[row], b.chosen[row]);
    std::vector<int32_t> common;
    std::ranges::set_intersection(a.chosen[row], expected.sequences()[0].chosen[row], std::back_inserter(common));
    EXPECT_GE(common.size(), 1095U) << "scores that differ by less than their rounding";
  }
  const size_t first = size_t{1308} * static_cast<size_t>(options.heads * options.rank);
  ASSERT_EQ(std::memcmp(a.out.data() + first, b.out.data() + first, (a.out.size() - first) * sizeof(float)), 0);
}

}  // namespace
}  // namespace kvanta::attention
