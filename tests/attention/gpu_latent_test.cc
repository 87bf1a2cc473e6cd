// Latent (MLA) attention on a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "attention/gpu_fixture.h"
#include "emulated/guarded_device.h"

namespace kvanta::attention {
namespace {

class GpuLatentTest : public GpuAttentionTest {};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuLatentTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

struct LatentCase {
  const char* scheme;
  int rank;
  int rope_dim;
};
constexpr LatentCase kLatentCases[] = {
    {"mla_fp8", 512, 64},
    {"mla_nvfp4", 160, 2},
#ifndef KVANTA_SANITIZED
    {"mla_int4", 512, 64},
    {"mla_nvfp4", 512, 64},
    {"mla_fp8_e5m2", 512, 64},
    {"mla_int8", 192, 64},
    {"bf16", 512, 64},
    {"mla_fp8", 64, 16},
    {"mla_fp8+exact=2+sink=1", 256, 32},
    {"mla_int4+exact=none", 96, 256},
    {"fp16", 200, 10},
    {"fp32", 512, 64},
    {"fp32", 72, 6},
#endif
};

TEST_P(GpuLatentTest, AppendWritesTheBytesOfTheCpu) {
  uint32_t seed = 600;
  for (const auto& [scheme, rank, rope_dim] : kLatentCases) {
    CheckBytes({.scheme = scheme, .heads = 2, .head_dim = rank, .rope_dim = rope_dim, .page_size = 32}, seed++);
  }
}

TEST_P(GpuLatentTest, EveryFormatRankAndPageSize) {
  small_pages_ = true;
  uint32_t seed = 620;
  for (const auto& [scheme, rank, rope_dim] : kLatentCases) {
    const int page_size = 16 << (seed % 4);
    Check({.scheme = scheme,
           .heads = 3,
           .head_dim = rank,
           .rope_dim = rope_dim,
           .page_size = page_size,
           .lengths = {page_size + 90}},
          {{{0, page_size + 70}}, {{0, 1}}, {{0, 19}}}, seed);
    ++seed;
  }
}

TEST_P(GpuLatentTest, HeadCountsVisibilitiesAndSoftcap) {
  uint32_t seed = 640;
  for (const char* scheme : {"mla_fp8", "mla_int4", "bf16"}) {
    for (const int heads : {1, 7, 16, 20}) {
#ifdef KVANTA_SANITIZED
      if (heads != 7 && heads != 16) continue;
#endif
      Check({.scheme = scheme,
             .heads = heads,
             .head_dim = 128,
             .rope_dim = 16,
             .sliding_window = heads == 7 ? 37 : 0,
             .chunk = heads == 16 ? 37 : 0,
             .softcap = heads == 1 ? 5.0F : 0.0F,
             .lengths = {110, 40}},
            {{{0, 70}, {1, 5}}, {{0, 1}, {1, 1}}, {{1, 34}, {0, 39}}}, seed++);
    }
  }
}

TEST_P(GpuLatentTest, LargeTinyAndZeroInputs) {
  for (const char* scheme : {"mla_fp8", "mla_int4", "mla_nvfp4", "fp16"}) {
    for (const float magnitude : {0.0F, 1e-6F, 32.0F}) {
      Check({.scheme = scheme,
             .head_dim = 128,
             .rope_dim = 32,
             .magnitude = magnitude,
             .axis_queries = magnitude > 1,
             .lengths = {70}},
            {{{0, 65}}, {{0, 1}}, {{0, 4}}}, 660);
    }
  }
}

// Several KV splits: parallel in a decode step, serial in one task, combined.
TEST_P(GpuLatentTest, LongContext) {
  for (const char* scheme : {"mla_fp8", "mla_int4"}) {
    Check({.scheme = scheme, .heads = 4, .head_dim = 128, .rope_dim = 16, .page_size = 64, .lengths = {2200}},
          {{{0, 3}}, {{0, 1}}}, 680, 2190);
  }
}

TEST_P(GpuLatentTest, BitsAreInvariantToChunksBatchesAndSplits) {
#ifdef KVANTA_SANITIZED
  const int before = 20;
#else
  const int before = 1060;  // beyond the first KV split
#endif
  for (const char* scheme : {"mla_fp8", "mla_int4", "mla_nvfp4", "bf16", "fp32"}) {
    const bool first = std::string_view(scheme) == "mla_fp8";
    CheckBits({.scheme = scheme, .heads = 3, .head_dim = 256, .rope_dim = 16}, first ? before : 20);
    if (!first) continue;
    CheckBits({.scheme = scheme, .heads = 3, .head_dim = 256, .rope_dim = 16, .sliding_window = 50}, before);
    CheckBits({.scheme = scheme, .heads = 3, .head_dim = 256, .rope_dim = 16, .chunk = 50}, before);
  }
}

// Tiles of a token's heads, or of adjacent tokens, that share what a block decodes.
TEST_P(GpuLatentTest, TileGroupsHaveTheBitsOfSingleTiles) {
  struct Case {
    const char* scheme;
    int heads;
    int before;  // tokens of the sequence with a prompt
    HarnessOptions options = {.page_size = 64};
    int prompt = 2;
    // Launches more with groups: theirs and the combination, less that of single tiles if there are none.
    int more_of_prompt = 1;
    int more_of_decode = 1;
  };
  std::vector<Case> cases = {
      {"mla_fp8", 80, 150, {.page_size = 64}, 1, 2, 2},  // a group of four tiles, and one tile
#ifndef KVANTA_SANITIZED
      {"mla_fp8", 64, 150},
      {"mla_int4", 40, 330, {.page_size = 64}, 5},  // three tiles of a token; the first page and the last exact
      {"mla_nvfp4+exact=2+sink=1", 64, 400},
      {"mla_fp8", 128, 1100},  // two KV splits
      {"mla_fp8_e5m2", 64, 130, {.page_size = 128, .softcap = 5}},
      {"mla_int8", 48, 330, {.page_size = 32, .sliding_window = 150}, 4},
      {"mla_int4+exact=none", 64, 300, {.page_size = 32, .chunk = 170}},
      {"bf16", 64, 150},
      {"bf16", 48, 300, {.page_size = 64, .sliding_window = 200}, 2, 2},  // groups of four and single tiles
      {"fp16", 64, 150},
      {"mla_fp8", 16, 150, {.page_size = 32}, 7, 2, 0},  // tokens in a group, and none in decode
      {"mla_int4", 32, 150, {.page_size = 64}, 5, 2, 0},
      {"mla_nvfp4", 5, 330, {.page_size = 64}, 13, 2, 0},
      {"mla_fp8", 64, 140, {.page_size = 16}},  // chunks of 16 tokens
      {"fp32", 48, 40, {}, 2, 0, 0},            // no groups
#endif
  };
  bool divides = false;
  for (auto& [scheme, heads, before, options, prompt, more_of_prompt, more_of_decode] : cases) {
    SCOPED_TRACE(fmt::format("{} for {} heads, {} tokens before", scheme, heads, before));
    options.scheme = scheme;
    options.heads = heads;
    options.head_dim = 512;
    options.rope_dim = 64;
    options.lengths = {before + prompt + 2, 6};
    small_pages_ = options.page_size == 16;
    const HarnessOptions on = On(options);
    CacheHarness one(on, 13), two(on, 13);
    for (CacheHarness* harness : {&one, &two}) {  // some tokens of large values raise their chunk's exponent
      std::vector<float>& k = harness->sequences()[0].k;
      const auto width = static_cast<size_t>(harness->KvWidth());
      for (size_t i = 0; i < k.size(); ++i) k[i] *= i / width % 37 == 20 ? 0x1p4F : 1.0F;
    }
    const int64_t max_result_rows = divides ? kMaxResultRows : 0;
    const std::unique_ptr<Backend> groups = Make(one, max_result_rows), single = Make(two, max_result_rows, false);
    int64_t launches[2][3] = {};  // [groups][step]
    for (const bool of_groups : {true, false}) {
      CacheHarness& harness = of_groups ? one : two;
      Backend& backend = of_groups ? *groups : *single;
      harness.Append(backend, {0, before});
      harness.RunStep(backend, {{1, 2}});
      const auto launched = [&] { return dynamic_cast<const testing::GuardedDevice&>(gpu_->device()).Launches(); };
      for (const size_t step : {0, 1, 2}) {  // a prompt, decode, decode as graphs capture it
        const int64_t first = emulated_ ? launched() : 0;
        harness.RunStep(backend, {{0, step == 0 ? prompt : 1}, {1, 1}}, nullptr, step == 2 ? 4 : 0);
        launches[of_groups ? 1 : 0][step] = emulated_ ? launched() - first : 0;
      }
    }
    gpu_->device().Synchronize();
    if (emulated_) {
      EXPECT_EQ(launches[1][0] - launches[0][0], more_of_prompt);
      EXPECT_EQ(launches[1][1] - launches[0][1], more_of_decode);
      EXPECT_EQ(launches[1][2] - launches[0][2], more_of_decode);
    }
    CompareBits(one, two, before);
    divides = !divides;
  }
}

// A NaN in a latent makes exactly the rows that see it NaN, also within a tile.
TEST_P(GpuLatentTest, NanReachesOnlyRowsThatSeeIt) {
  for (const char* scheme : {"bf16", "mla_fp8"}) {
    const HarnessOptions options =
        On({.scheme = scheme, .heads = 2, .head_dim = 256, .rope_dim = 16, .sliding_window = 20, .lengths = {80}});
    CacheHarness clean(options, 11), dirty(options, 11);
    constexpr int kToken = 37;
    dirty.sequences()[0].k[static_cast<size_t>(kToken * dirty.KvWidth() + 200)] = std::nanf("");
    const std::unique_ptr<Backend> first = Make(clean), second = Make(dirty);
    clean.RunStep(*first, {{0, 80}});
    dirty.RunStep(*second, {{0, 80}});
    for (int token = 0; token < 80; ++token) {
      for (int64_t i = token * clean.OutWidth(); i < (token + 1) * clean.OutWidth(); ++i) {
        const auto index = static_cast<size_t>(i);
        if (token >= kToken && token < kToken + 20) {
          ASSERT_TRUE(std::isnan(dirty.sequences()[0].out[index])) << token;
        } else {
          ASSERT_EQ(clean.sequences()[0].out[index], dirty.sequences()[0].out[index]) << token;
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::attention
