// Latent (MLA) attention on a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <string_view>

#include "attention/gpu_fixture.h"

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
