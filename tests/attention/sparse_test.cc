// Sparse attention: the selection of tokens and attention to them, against the reference and bit for bit over chunks,
// batches and threads.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "attention/gathered_attention.h"
#include "attention/sparse_harness.h"
#include "attention/token_selector.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

using ::testing::ElementsAre;

std::vector<int32_t> Choose(const std::vector<float>& scores, int count) {
  std::vector<int32_t> scratch(scores.size());
  std::vector<int32_t> positions(static_cast<size_t>(count));
  ChooseLargest(scores, count, scratch.data(), positions.data());
  return positions;
}

TEST(ChooseLargest, OfEqualScoresTheEarlier) {
  EXPECT_THAT(Choose({1, 3, 2, 3, 3, 0}, 2), ElementsAre(1, 3));
  EXPECT_THAT(Choose({1, 3, 2, 3, 3, 0}, 4), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(Choose({0, -0.0F, 0, -0.0F}, 3), ElementsAre(0, 1, 2)) << "zeros of both signs are equal";
}

TEST(ChooseLargest, NumbersThatAreNoneComeLast) {
  const float nan = std::nanf(""), infinity = std::numeric_limits<float>::infinity();
  EXPECT_THAT(Choose({nan, -5, infinity, nan, -7}, 3), ElementsAre(1, 2, 4));
  EXPECT_THAT(Choose({nan, -infinity, nan, 1}, 2), ElementsAre(0, 3)) << "as the smallest number";
}

TEST(ChooseLargest, AsSortingDoes) {
  std::mt19937 random(5);
  for (const size_t size : {2, 15, 16, 17, 100, 1000, 5003, 20000}) {
    for (const int kinds : {2, 50, 1 << 20}) {  // of scores: few have many equal ones
      std::vector<float> scores(size);
      for (float& score : scores)
        score = std::ldexp(static_cast<float>(static_cast<int>(random() % kinds) - kinds / 2), -8);
      std::vector<int32_t> expected(size);
      std::iota(expected.begin(), expected.end(), 0);
      std::ranges::stable_sort(expected, std::greater<>(), [&](int32_t at) { return scores[static_cast<size_t>(at)]; });
      const auto count = static_cast<int>(1 + random() % (size - 1));
      expected.resize(static_cast<size_t>(count));
      std::ranges::sort(expected);
      EXPECT_EQ(Choose(scores, count), expected) << size << " scores of " << kinds << " kinds";
    }
  }
}

cache::GatheredPages PagesOf(const cache::ExactPageRule& rule, int page_size, int own_page,
                             const std::vector<int32_t>& positions) {
  return cache::GatheredPages::Of(rule, page_size, own_page, positions.data(), static_cast<int32_t>(positions.size()));
}

TEST(GatheredPages, TokensOfOneKindOfRecordShareAPage) {
  const std::vector<int32_t> positions = {0, 5, 15, 16, 40, 47, 48, 52, 63};
  const cache::GatheredPages pages = PagesOf({.open = 1, .sinks = 1}, 16, 3, positions);
  EXPECT_THAT(pages.tokens, ElementsAre(3, 3, 3));
  EXPECT_THAT(pages.ends, ElementsAre(1, 2, 3));
  const cache::GatheredPages quantized = PagesOf({}, 4, 15, positions);
  EXPECT_THAT(quantized.tokens, ElementsAre(0, 9, 0));
  EXPECT_EQ(quantized.Pages(), 3);
  EXPECT_EQ(quantized.TokensOf(2), 1);
  const cache::GatheredPages first = PagesOf({.open = 2, .sinks = 1}, 16, 1, {3, 17});
  EXPECT_THAT(first.tokens, ElementsAre(2, 0, 0)) << "all pages are exact";
}

struct Case {
  std::string latents, keys;
};

std::vector<Case> Cases() {
  return {{"fp32", "fp32"},
          {"bf16", "bf16"},
          {"mla_fp8", "mla_fp8+hadamard"},
          {"mla_int8", "mla_int8"},
          {"mla_int4", "fp16"},
          {"mla_nvfp4", "mla_nvfp4+hadamard"},
          {"mla_fp8", "mla_int4"},
          {"mla_int4+exact=2+sink=2", "mla_int4+hadamard+exact=2"}};
}

class SparseTest : public ::testing::TestWithParam<std::tuple<testing::Unit, Case>> {
 protected:
  const kernels::IsaTable& Isa() const { return *std::get<0>(GetParam()).table; }
  SparseOptions Options() const {
    return {.latents = std::get<1>(GetParam()).latents, .keys = std::get<1>(GetParam()).keys};
  }
  int RandomCases() const {
#ifdef KVANTA_SANITIZED
    return 2;
#else
    return std::get<0>(GetParam()).name.ends_with("_emulated") ? 2 : 30;
#endif
  }
};

INSTANTIATE_TEST_SUITE_P(Units, SparseTest,
                         ::testing::Combine(::testing::ValuesIn(testing::Units()), ::testing::ValuesIn(Cases())),
                         [](const auto& param) {
                           const Case& formats = std::get<1>(param.param);
                           std::string name =
                               fmt::format("{}_{}_{}", std::get<0>(param.param).name, formats.latents, formats.keys);
                           for (char& c : name) {
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           }
                           return name;
                         });

TEST_P(SparseTest, ChoosesAndAttendsAsTheReference) {
  SparseOptions options = Options();
  options.lengths = {90};
  SparseHarness world(options, 3), expected(options, 3);
  const std::unique_ptr<Backend> backend = world.CpuBackend(Isa());
  const std::unique_ptr<Backend> reference = expected.Reference();
  for (const int tokens : {33, 1, 1, 30, 25}) {
    world.RunStep(*backend, {{0, tokens}});
    expected.RunStep(*reference, {{0, tokens}});
  }
  const auto& found = world.sequences()[0];
  const auto& sequence = expected.sequences()[0];
  const bool is_float = options.keys.find("mla_") == std::string::npos;
  const int width = options.heads * options.rank;
  int same = 0;
  double largest = 0, error = 0;
  for (size_t row = 0; row < 90; ++row) {
    ASSERT_EQ(found.chosen[row].size(), row < 16 ? 0U : 16U) << row;
    ASSERT_EQ(sequence.chosen[row].size(), found.chosen[row].size());
    if (options.keys == "fp32") {
      ASSERT_EQ(found.chosen[row], sequence.chosen[row]) << row;
    }
    if (found.chosen[row] != sequence.chosen[row]) continue;  // scores that differ by less than their rounding
    ++same;
    for (size_t i = row * static_cast<size_t>(width); i < (row + 1) * static_cast<size_t>(width); ++i) {
      largest = std::max(largest, std::abs(double{sequence.out[i]}));
      error = std::max(error, std::abs(double{sequence.out[i]} - double{found.out[i]}));
    }
  }
  EXPECT_GE(same, is_float ? 85 : 70);
  EXPECT_LT(error, 0.03 * largest) << "operands of 8 bits";
  if (options.latents == "fp32") {
    EXPECT_LT(error, 1e-5 * largest);
  }
}

// Same sequences: token by token on one thread, and random batches of random chunks on several.
TEST_P(SparseTest, BitsDoNotDependOnChunksBatchesAndThreads) {
  for (int seed = 0; seed < RandomCases(); ++seed) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    const auto pick = [&](std::initializer_list<int> values) {
      return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random)];
    };
    SparseOptions options = Options();
    options.page_size = pick({16, 16, 32, 64});
    options.top_k = pick({1, 7, 16, 33});
    options.heads = pick({1, 3, 4, 17});
    options.index_heads = pick({1, 4, 18});
    options.lengths = {pick({30, 61, 80}), pick({1, 17, 40}), pick({16, 33})};
    SCOPED_TRACE(fmt::format("seed {}: page {}, top {}, heads {}, {}", seed, options.page_size, options.top_k,
                             options.heads, options.index_heads));
    SparseHarness one(options, static_cast<uint32_t>(seed)), two(options, static_cast<uint32_t>(seed));
    const std::unique_ptr<Backend> serial = one.CpuBackend(Isa()), parallel = two.CpuBackend(Isa(), pick({1, 2, 4}));
    ExpectSameBitsInBatches(options.lengths, one, *serial, two, *parallel, random);
    if (HasFatalFailure()) return;
  }
}

// More tokens than a split has: the splits of a row in one task, and spread over threads.
TEST_P(SparseTest, SplitsOverThreadsHaveTheSameBits) {
  SparseOptions options = Options();
  options.page_size = 64;
  options.top_k = 1100;
  options.lengths = {1300};
  SparseHarness one(options, 9), two(options, 9);
  const std::unique_ptr<Backend> serial = one.CpuBackend(Isa()), parallel = two.CpuBackend(Isa(), 4);
  one.RunStep(*serial, {{0, 1300}});
  two.RunStep(*parallel, {{0, 1290}});
  for (int token = 0; token < 10; ++token) two.RunStep(*parallel, {{0, 1}});
  const auto &a = one.sequences()[0], &b = two.sequences()[0];
  ASSERT_EQ(a.chosen, b.chosen);
  ASSERT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)), 0);
}

// Attention to a selection of everything.
TEST_P(SparseTest, ASelectionOfAllTokensHasTheBitsOfDenseAttention) {
  SparseOptions options = Options();
  options.lengths = {1100};
  options.top_k = 2000;  // dense
  SparseHarness world(options, 4);
  const std::unique_ptr<Backend> backend = world.CpuBackend(Isa());
  world.RunStep(*backend, {{0, 1099}});
  world.RunStep(*backend, {{0, 1}});
  auto& sequence = world.sequences()[0];

  formats::LayerScales scales;
  scales.k.scale = scales.v.scale = {1};
  const std::vector<LayerView> views(
      1, LayerView(world.pool().Layout().layers[0], world.config().layers[0], scales, world.pool()));
  ThreadPool threads(1);
  GatheredAttention gathered(Cpu(), views, 1100, *Isa().attention, threads);
  std::vector<TileWorkspace> workspaces(1);
  workspaces[0].Reserve(Cpu(), 64, views, *Isa().attention);
  ChosenTokens chosen;
  chosen.top_k = 1100;
  chosen.rows.push_back({.sequence = 0, .row = 0, .position = 1099});
  chosen.positions.resize(1100);
  std::iota(chosen.positions.begin(), chosen.positions.end(), 0);
  Batch batch;
  batch.sequences.push_back({.span = {.start = 1099, .tokens = 1, .pages = sequence.table_data.data()}});
  const int64_t q_width = int64_t{options.heads} * (options.rank + options.rope_dim);
  std::vector<float> out(static_cast<size_t>(options.heads * options.rank), std::nanf(""));
  gathered.Run(batch, chosen, 0, sequence.rows[2].data() + 1099 * q_width, q_width, out.data(), workspaces);
  EXPECT_EQ(std::memcmp(out.data(), sequence.out.data() + 1099 * out.size(), out.size() * sizeof(float)), 0);
}

TEST(SparseTest, RefusesWhatItIsNotMadeFor) {
  SparseHarness world({}, 1);
  const auto refused = [&](auto change) {
    BackendConfig config = world.config();
    change(config);
    try {
      MakeReferenceBackend(world.pool(), config);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  using ::testing::HasSubstr;
  EXPECT_THAT(refused([](BackendConfig& config) { config.layers[1].index_topk = 3; }), HasSubstr("in all layers"));
  EXPECT_THAT(refused([](BackendConfig& config) { config.layers[1].index_topk = 0; }), HasSubstr("sparse attention"));
  EXPECT_THAT(refused([](BackendConfig& config) { config.layers[0].visibility = cache::SlidingWindow(8); }),
              HasSubstr("without a window"));
}

}  // namespace
}  // namespace kvanta::attention
