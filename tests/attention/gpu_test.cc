// Attention kernels on an emulated and, if present, a real GPU: the CPU's bytes, the reference's results, and bits that
// do not depend on chunks, batches and KV splits.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attention/gpu_fixture.h"
#include "bench/gpu_bench.h"
#include "error_of.h"
#include "kvanta/error.h"

namespace kvanta::attention {
namespace {

TEST_P(GpuAttentionTest, BenchmarkVerifiesItsResults) {
  AttentionBench options;
  options.formats = {"int4+exact=none", "mla_fp8"};
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 64;
  options.batch = 2;
  options.context = 100;
  options.seconds = 0;
  const std::vector<GpuBenchRow> rows = RunGpuBench(options, gpu_, 1 << 16);
  ASSERT_EQ(rows.size(), 2U);
  for (const GpuBenchRow& row : rows) {
    EXPECT_EQ(row.unit, gpu_->Name());
    EXPECT_GT(row.max_error, 0);
    EXPECT_LT(row.max_error, 2e-3);
    EXPECT_GT(row.ns_median, 0);
    EXPECT_NEAR(row.share_of_limit, row.gb_s / row.copy_gb_s, 1e-12);
  }
  EXPECT_EQ(rows[1].bytes, 2 * 101 * 656);
}

TEST_P(GpuAttentionTest, RoundedStatesAreRefused) {
  const KvScheme bf16 = KvScheme::Parse("bf16");
  const formats::LayerShape recurrent{
      .kv_heads = 0, .head_dim = 64, .state = {.matrices = 1, .rows = 8, .columns = 8, .others = 32}};
  const formats::CacheLayout layout = formats::PlanCache({bf16, bf16}, {{1, 64}, recurrent}, 64, {0, 1},
                                                         {.code = formats::StateCode::kInt8, .grid = 64});
  cache::PagePool pool(gpu_->device(), layout, {.budget_bytes = 1 << 20});
  const BackendConfig config{.layers = {{.heads = 1, .kv_heads = 1, .head_dim = 64, .softmax_scale = 1},
                                        {.visibility = cache::kRecurrentVisibility}},
                             .scales = {}};
  EXPECT_EQ(ErrorOf([&] { MakeGpuBackend(pool, config, gpu_); }),
            "state_cache_dtype int8: " + gpu_->Name() +
                " does not support states that are rounded; there is: float32 (device cpu has all)");
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuAttentionTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

constexpr const char* kFormats[] = {"int4",
#ifndef KVANTA_SANITIZED  // sanitized emulation is slow
                                    "bf16", "fp8_e4m3", "int8", "nvfp4"
#endif
};
constexpr const char* kRules[] = {"nvfp4",
                                  "fp8+exact=open",
#ifndef KVANTA_SANITIZED
                                  "int8",
                                  "int4",
                                  "bf16",
                                  "k=int8+mean,v=int8",
                                  "int4+exact=2+sink=2",
                                  "int4+exact=none",
                                  "bf16+exact=open",
                                  "int4+outliers=6",
                                  "int4+query",
                                  "k=int8+mean+outliers=10,v=int8"
#endif
};
// Formats, pairs and shapes for the generic kernel.
struct GenericCase {
  const char* scheme;
  int head_dim;
};
constexpr GenericCase kGenericCases[] = {
    {"k=kivi4,v=nvfp4", 64},
    {"kivi2", 96},
    {"fp32", 72},
    {"int4+outliers=4", 64},
    {"t3", 64},
    {"klt3", 64},
    {"t4", 96},
#ifndef KVANTA_SANITIZED
    {"kivi4", 128},
    {"kivi3", 64},
    {"fp16", 72},
    {"fp8_e5m2", 80},
    {"fp8_per_token_head", 40},
    {"mxfp8", 64},
    {"mxfp6_e3m2", 96},
    {"k=mxfp6_e3m2,v=int8", 64},
    {"int8_g32", 96},
    {"int6_g32", 64},
    {"int5_g32", 96},
    {"int4_per_token_head", 80},
    {"int3_g32", 64},
    {"int2_g32", 128},
    {"t2", 32},
    {"t3+query", 96},
    {"k=t2,v=nvfp4+exact=none", 64},
    {"nvfp4_4over6", 80},
    {"mxfp4", 96},
    {"fp4_e2m1", 112},
    {"turboquant_k8v4", 64},
    {"turboquant_4bit_nc", 72},
    {"turboquant_k3v4_nc", 64},
    {"turboquant_3bit_nc", 96},
    {"bf16", 80},
    {"fp16", 256},
    {"int8", 80},
    {"mxfp4", 256},
    {"int4", 96},
    {"k=fp8,v=nvfp4", 64},
    {"k=int8,v=int4", 128},
    {"k=bf16,v=int4", 64},
    {"k=kivi4,v=int2_g32", 64},
    {"k=int4+mean,v=fp16", 64},
    {"int4+query", 64},
    {"k=int5_g32+query+outliers=4,v=int4", 96},
    {"k=fp16,v=mxfp4", 64},
    {"k=nvfp4,v=bf16+exact=2", 80},
    {"k=mxfp8,v=kivi2", 64},
    {"k=fp32,v=int4", 128},
    {"k=nvfp4,v=fp32+exact=2", 64},
    {"int8+outliers=2", 128},
    {"k=kivi4+outliers=32,v=nvfp4", 96},
    {"k=bf16+outliers=64,v=fp8+exact=none", 256},
    {"k=fp32+outliers=10,v=int8", 72},
#endif
};
constexpr std::pair<int, int> kHeads[] = {{18, 1},
#ifndef KVANTA_SANITIZED
                                          {1, 1},  {4, 2}, {8, 1},
                                          {7, 1},  {16, 1}
#endif
};

TEST_P(GpuAttentionTest, AppendWritesTheBytesOfTheCpu) {
  uint32_t seed = 1;
  for (const char* scheme : {"bf16",
                             "fp8_e4m3",
                             "int8",
                             "int4",
                             "int4+exact=none",
                             "nvfp4",
                             "nvfp4_4over6+exact=none",
                             "k=int8+mean,v=int8+exact=2",
                             "nvfp4+hadamard+sink=2",
                             "kivi4",
                             "kivi2",
                             "int5_g32+mean",
                             "int3_g32",
                             "k=kivi4,v=int4_per_token_head",
                             "mxfp4",
                             "int4+outliers=4",
                             "int4+query",
                             "k=int5_g32+query+outliers=2,v=int4",
                             "k=int8+mean+outliers=10,v=fp8_e4m3",
                             "kivi4+outliers=2",
                             "t3",
                             "klt3",
                             "k=klt2,v=t4",
                             "t2+exact=none"}) {
    HarnessOptions options{.scheme = scheme, .heads = 3, .kv_heads = 3, .page_size = 32, .static_scale = 0.37F};
    options.head_dim = seed % 2 == 0 ? 64 : 128;
    CheckBytes(options, seed++);
  }
}

// Bits and scales of token groups: of zeros, of large values, and of each of a page's groups.
TEST_P(GpuAttentionTest, AppendWritesTheTokenGroupsOfTheCpu) {
  uint32_t seed = 60;
  for (const auto& [scheme, head_dim, page_size] : {std::tuple{"klt3_g64", 64, 64},
#ifndef KVANTA_SANITIZED
                                                    {"k=klt2_g64,v=t4", 128, 64},
                                                    {"k=klt3_g64,v=nvfp4", 256, 64},
                                                    {"klt2_g64", 32, 64},
#endif
                                                    {"klt2_g64", 48, 128}}) {
    CheckBytes({.scheme = scheme, .heads = 3, .kv_heads = 3, .head_dim = head_dim, .page_size = page_size}, seed++);
  }
}

TEST_P(GpuAttentionTest, EveryFormatPageSizeAndHeadDim) {
  uint32_t seed = 100;
  for (const char* scheme : kFormats) {
    for (const int page_size : {32, 64, 128}) {
      if (page_size == 128 && std::string_view(scheme) != "int4") continue;
      Check({.scheme = scheme,
             .heads = 3,
             .kv_heads = 1,
             .head_dim = page_size == 64 ? 128 : 64,
             .page_size = page_size,
             .static_scale = 0.37F,
             .lengths = {3 * page_size + 10}},
            {{{0, 2 * page_size + 5}}, {{0, 1}}, {{0, page_size + 4}}}, seed++);
    }
  }
}

TEST_P(GpuAttentionTest, GenericKernelFormatsPairsAndHeadDims) {
  uint32_t seed = 150;
  for (const auto& [scheme, head_dim] : kGenericCases) {
    const int page_size = seed % 2 == 0 ? 32 : 64;
    Check({.scheme = scheme,
           .heads = 3,
           .kv_heads = 1,
           .head_dim = head_dim,
           .page_size = page_size,
           .static_scale = 0.37F,
           .lengths = {2 * page_size + 40}},
          {{{0, 2 * page_size - 3}}, {{0, 9}}, {{0, 1}}}, seed);
    ++seed;
  }
}

TEST_P(GpuAttentionTest, TrellisCodes) {
  uint32_t seed = 180;
  for (const char* scheme : {"t4", "t3", "t2", "klt3", "klt2"}) {
    Check({.scheme = scheme,
           .heads = 10,
           .kv_heads = 1,
           .head_dim = 128,
           .page_size = 32,
           .sliding_window = seed % 2 == 0 ? 0 : 70,
           .sinks = true,
           .lengths = {108}},
          {{{0, 98}}, {{0, 9}}, {{0, 1}}}, seed);
    ++seed;
  }
  for (const char* scheme : {"t3", "klt2"}) CheckBits({.scheme = scheme, .heads = 3, .kv_heads = 1}, 80);
}

TEST_P(GpuAttentionTest, TokenGroupsWithBits) {
  uint32_t seed = 190;
  for (const auto& [scheme, head_dim, page_size] : {std::tuple{"klt3_g64", 64, 64},
                                                    {"klt2_g64", 48, 128},
#ifndef KVANTA_SANITIZED
                                                    {"klt2_g64", 128, 64},
                                                    {"k=klt3_g64,v=int8", 96, 128},
                                                    {"k=klt2_g64,v=kivi2", 256, 64}
#endif
       }) {
    Check({.scheme = scheme,
           .heads = 10,
           .kv_heads = 2,
           .head_dim = head_dim,
           .page_size = page_size,
           .sliding_window = seed % 2 == 0 ? 0 : 150,
           .lengths = {2 * page_size + 80}},
          {{{0, 2 * page_size + 60}}, {{0, 9}}, {{0, 1}}}, seed);
    ++seed;
  }
  // Page 1 closes by a token of a decode step, and within a chunk.
  CheckBits({.scheme = "klt2_g64", .heads = 3, .kv_heads = 1, .page_size = 64}, 100);
}

// A group whose bits are not those of its format, which no encoder writes, has no bits.
TEST_P(GpuAttentionTest, TokenGroupsWithOtherBitsAreZeros) {
  for (const int bits : {0xF1, 0x77}) {
    SCOPED_TRACE(bits);
    CacheHarness harness(On({.scheme = "klt2_g64", .heads = 2, .kv_heads = 1, .page_size = 64, .lengths = {140}}), 5);
    const std::unique_ptr<Backend> backend = Make(harness);
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
    harness.Append(*backend, {0, 130});
    gpu_->device().Synchronize();
    const formats::LayerScheme& layer = harness.layout().layers[0];
    const cache::PageId page = harness.sequences()[0].table[1].Of(cache::PageKind::kQuantized);
    uint8_t* const section =
        harness.store().Record(0, cache::PageKind::kQuantized, page) + layer.KCell(0) + layer.k.sections.channel_scales;
    const auto two_blocks = static_cast<uint8_t>(bits);
    harness.store().device().CopyIn(section + layer.shape.head_dim / 2, &two_blocks, 1);
    harness.RunStep(*backend, {{0, 9}}, reference.get());
    CompareWithReference(harness, 130);
  }
}

// Heads of more than 256 channels have tiles of 8 query rows; a group of 10 takes two.
TEST_P(GpuAttentionTest, WideHeads) {
  uint32_t seed = 165;
  for (const char* scheme : {"int4", "kivi2", "bf16"}) {
    Check({.scheme = scheme, .heads = 10, .kv_heads = 1, .head_dim = seed % 2 == 0 ? 288 : 512, .lengths = {80}},
          {{{0, 67}}, {{0, 3}}, {{0, 1}}}, seed);
    ++seed;
  }
}

// Chunks of 16 tokens, adjacent exact and quantized pages, windows that end within a chunk.
TEST_P(GpuAttentionTest, PagesOf16Tokens) {
  small_pages_ = true;
  uint32_t seed = 170;
  for (const char* scheme :
       {"int4", "fp8+exact=open", "k=int4_per_token_head,v=mxfp8", "k=nvfp4,v=fp4_e2m1+exact=2", "int4+outliers=2"}) {
    for (const int window : {0, 21}) {
      Check({.scheme = scheme, .heads = 3, .kv_heads = 1, .page_size = 16, .sliding_window = window, .lengths = {90}},
            {{{0, 70}}, {{0, 1}}, {{0, 19}}}, seed++);
    }
  }
}

TEST_P(GpuAttentionTest, EveryGroupOfHeads) {
  uint32_t seed = 200;
  for (const auto& [heads, kv_heads] : kHeads) {
    Check({.scheme = seed % 2 == 0 ? "int4" : "fp8_e4m3",
           .heads = heads,
           .kv_heads = kv_heads,
           .sliding_window = heads == 7 ? 1 : 0,
           .lengths = {100}},
          {{{0, 70}}, {{0, 1}}, {{0, 29}}}, seed);
    ++seed;
  }
}

TEST_P(GpuAttentionTest, VisibilitiesSoftcapSinksMeansAndPageRules) {
  uint32_t seed = 300;
  for (const char* scheme : kRules) {
    for (const auto& [window, chunk] : {std::pair{0, 0}, {37, 0}, {0, 37}}) {
      Check({.scheme = scheme,
             .heads = 4,
             .kv_heads = 2,
             .sliding_window = window,
             .chunk = chunk,
             .softcap = window == 37 ? 5.0F : 0.0F,
             .sinks = chunk == 0,
             .lengths = {110, 40}},
            {{{0, 70}, {1, 5}}, {{0, 1}, {1, 1}}, {{1, 34}, {0, 39}}}, seed++);
    }
  }
}

TEST_P(GpuAttentionTest, LargeTinyAndZeroInputs) {
  for (const char* scheme : kFormats) {
    for (const float magnitude : {0.0F, 1e-6F, 32.0F}) {
      Check({.scheme = scheme, .magnitude = magnitude, .axis_queries = magnitude > 1, .lengths = {70}},
            {{{0, 65}}, {{0, 1}}, {{0, 4}}}, 400);
    }
  }
}

// Several KV splits: parallel in a decode step, serial in one task, combined.
TEST_P(GpuAttentionTest, LongContext) {
  for (const char* scheme : kFormats) {
    Check({.scheme = scheme, .heads = 4, .kv_heads = 1, .page_size = 64, .sinks = true, .lengths = {2200}},
          {{{0, 3}}, {{0, 1}}}, 500, 2190);
  }
}

TEST_P(GpuAttentionTest, BitsAreInvariantToChunksBatchesAndSplits) {
#ifdef KVANTA_SANITIZED
  const int before = 20;
#else
  const int before = 1060;  // beyond the first KV split
#endif
  std::vector<const char*> schemes(std::begin(kFormats), std::end(kFormats));
  for (const char* rare : {"k=kivi4,v=fp4_e2m1", "fp8_e5m2", "int4+outliers=4"}) schemes.push_back(rare);
  for (const char* scheme : schemes) {
    CheckBits({.scheme = scheme, .heads = 3, .kv_heads = 1}, before);
    if (std::string_view(scheme) != "int4") continue;
    CheckBits({.scheme = scheme, .heads = 3, .kv_heads = 1, .sliding_window = 50}, before);
    CheckBits({.scheme = scheme, .heads = 3, .kv_heads = 1, .chunk = 50}, before);
  }
}

// A NaN in a value reaches exactly the rows that see it, also within a tile.
TEST_P(GpuAttentionTest, NanReachesOnlyRowsThatSeeIt) {
  for (const auto& [scheme, chunked] :
       {std::pair{"bf16", false}, {"fp8_e4m3", false}, {"fp8_e5m2", false}, {"bf16", true}, {"fp8_e5m2", true}}) {
    SCOPED_TRACE(fmt::format("{} chunked {}", scheme, chunked));
    const HarnessOptions options = On({.scheme = scheme,
                                       .heads = 2,
                                       .kv_heads = 2,
                                       .sliding_window = chunked ? 0 : 20,
                                       .chunk = chunked ? 20 : 0,
                                       .lengths = {80}});
    const int last_query = chunked ? 39 : 56;  // the last query that sees kToken
    CacheHarness clean(options, 11), dirty(options, 11);
    constexpr int kToken = 37;
    dirty.sequences()[0].v[static_cast<size_t>(kToken * dirty.KvWidth() + 64 + 5)] = std::nanf("");  // KV head 1
    const std::unique_ptr<Backend> first = Make(clean), second = Make(dirty);
    clean.RunStep(*first, {{0, 80}});
    dirty.RunStep(*second, {{0, 80}});
    for (int token = 0; token < 80; ++token) {
      for (int channel = 0; channel < 128; ++channel) {
        const size_t index = static_cast<size_t>(token * clean.OutWidth() + channel);
        if (channel == 64 + 5 && token >= kToken && token <= last_query) {
          ASSERT_TRUE(std::isnan(dirty.sequences()[0].out[index])) << token;
        } else {
          ASSERT_EQ(clean.sequences()[0].out[index], dirty.sequences()[0].out[index]) << token << " " << channel;
        }
      }
    }
  }
}

TEST_P(GpuAttentionTest, RefusesHeadsWiderThanItsKernelsTake) {
  CacheHarness harness(On({.scheme = "bf16", .heads = 2, .kv_heads = 1, .head_dim = 520}), 1);
  try {
    Make(harness);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(), "layer 0: head_dim 520: backend cuda takes multiples of 8 from 8 to 512");
  }
}

// GpuLayerBuilder rejects formats without a kernel.
TEST_P(GpuAttentionTest, EveryFormatHasKernels) {
  for (const formats::Format& format : formats::All()) {
    HarnessOptions options{.scheme = std::string(format.name),
                           .heads = 2,
                           .kv_heads = 1,
                           .head_dim = 512,
                           .page_size = std::max(32, format.scaling.token_group)};
    CacheHarness harness(On(options), 1);
    EXPECT_NO_THROW(Make(harness)) << format.name;
  }
}

}  // namespace
}  // namespace kvanta::attention
