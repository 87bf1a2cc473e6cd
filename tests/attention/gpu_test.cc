// The GPU's kernels, emulated and (where there is one) on a GPU: the CPU's bytes, the reference's rows, and bits that
// do not depend on chunks, batches and the cut into tasks.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/cache_harness.h"
#include "attention/gpu_backend.h"
#include "attention/gpu_bench.h"
#include "emulated/gpus.h"
#include "kvanta/error.h"
#include "tolerance.h"

namespace kvanta::attention {
namespace {

using ::testing::HasSubstr;

class GpuAttentionTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  HarnessOptions On(HarnessOptions options) const {
    options.device = &gpu_->device();
    if (!small_pages_) options.page_size = std::max(options.page_size, 32);
    return options;
  }
  std::unique_ptr<Backend> Make(CacheHarness& harness, int64_t most_spread_runs = kMostSpreadRuns) {
    return MakeGpuBackend(harness.store(), harness.config(), gpu_, most_spread_runs);
  }

  // Runs the steps and holds every row to the reference on the same bytes.
  void Check(const HarnessOptions& wanted, const std::vector<Step>& steps, uint32_t seed, int first_row = 0) {
    CacheHarness harness(On(wanted), seed);
    const HarnessOptions& options = harness.options();
    SCOPED_TRACE(fmt::format("{}: heads {}/{} of {}, page {}, window {}, softcap {}, magnitude {}", options.scheme,
                             options.heads, options.kv_heads, options.head_dim, options.page_size,
                             options.sliding_window, options.softcap, options.magnitude));
    const std::unique_ptr<Backend> backend = Make(harness);
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
    if (first_row > 0) harness.Append(*backend, {0, first_row});
    harness.Run(*backend, steps, reference.get());
    gpu_->Check();
    for (const CacheHarness::Sequence& sequence : harness.sequences()) {
      if (sequence.expected.empty()) continue;
      const double q_norm = LargestNorm(sequence.q, options.head_dim);
      const double k_norm =
          2 * LargestNorm(sequence.k, options.head_dim) + (harness.layout().layers[0].k.mean ? q_norm : 0);
      const double logit = double{harness.config().layers[0].softmax_scale} * q_norm * k_norm;
      const double tolerance = testing::GpuAttentionTolerance(options.head_dim, logit, options.softcap,
                                                              2 * LargestNorm(sequence.v, options.head_dim),
                                                              harness.layout().layers[0].k.format->scaling.tile != 0);
      for (int64_t i = first_row * harness.OutWidth(); i < sequence.start * harness.OutWidth(); ++i) {
        const size_t index = static_cast<size_t>(i);
        ASSERT_NEAR(sequence.out[index], sequence.expected[index], tolerance) << "row " << i / harness.OutWidth();
      }
      if (options.magnitude == 1) {
        EXPECT_LE(Rms(sequence, first_row * harness.OutWidth(), sequence.start * harness.OutWidth()),
                  options.scheme == "fp32" ? testing::kGpuF32AttentionRms : testing::kGpuAttentionRms);
      }
    }
  }

 protected:
  bool small_pages_ = false;  // pages of 16 tokens stay so

 private:
  static double Rms(const CacheHarness::Sequence& sequence, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      sum += std::pow(double{sequence.out[static_cast<size_t>(i)]} - sequence.expected[static_cast<size_t>(i)], 2);
    }
    return std::sqrt(sum / static_cast<double>(end - begin));
  }
  static double LargestNorm(const std::vector<float>& values, int head_dim) {
    double largest = 0;
    for (size_t first = 0; first < values.size(); first += static_cast<size_t>(head_dim)) {
      double sum = 0;
      for (size_t i = first; i < first + static_cast<size_t>(head_dim); ++i)
        sum += double{values[i]} * double{values[i]};
      largest = std::max(largest, std::sqrt(sum));
    }
    return largest;
  }
};

TEST_P(GpuAttentionTest, TheBenchVerifiesBeforeItMeasures) {
  AttentionBench options;
  options.formats = {"int4+exact=none"};
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 64;
  options.batch = 2;
  options.context = 100;
  options.seconds = 0;
  const std::vector<GpuBenchRow> rows = RunGpuBench(options, gpu_, 1 << 16);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].unit, gpu_->Name());
  EXPECT_GT(rows[0].max_error, 0);
  EXPECT_LT(rows[0].max_error, 2e-3);
  EXPECT_GT(rows[0].ns_median, 0);
  EXPECT_NEAR(rows[0].share_of_limit, rows[0].gb_s / rows[0].copy_gb_s, 1e-12);
  options.formats = {"mla_fp8"};  // no kernel has such
  EXPECT_THROW(RunGpuBench(options, gpu_, 1 << 16), InputError);
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuAttentionTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

constexpr const char* kFormats[] = {"int4",
#ifndef KVANTA_SANITIZED  // after faults of memory, in emulation that is slow as it is
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
                                  "k=int8+mean+outliers=10,v=int8"
#endif
};
// Formats, pairs and shapes that no kernel is made for alone.
struct Rare {
  const char* scheme;
  int head_dim;
};
constexpr Rare kRare[] = {
    {"k=kivi4,v=nvfp4", 64},
    {"kivi2", 96},
    {"fp32", 72},
    {"int4+outliers=4", 64},
#ifndef KVANTA_SANITIZED
    {"kivi4", 128},
    {"fp16", 72},
    {"fp8_e5m2", 80},
    {"fp8_per_token_head", 40},
    {"mxfp8", 64},
    {"int8_g32", 96},
    {"int6_g32", 64},
    {"int5_g32", 96},
    {"int4_per_token_head", 80},
    {"int3_g32", 64},
    {"int2_g32", 128},
    {"nvfp4_4over6", 80},
    {"mxfp4", 96},
    {"fp4_e2m1", 112},
    {"turboquant_k8v4", 64},
    {"turboquant_4bit_nc", 72},
    {"turboquant_k3v4_nc", 64},
    {"turboquant_3bit_nc", 96},
    {"bf16", 80},
    {"fp8", 256},
    {"int8", 80},
    {"int4", 256},
    {"int4", 96},
    {"k=fp8,v=nvfp4", 64},
    {"k=int8,v=int4", 128},
    {"k=bf16,v=int4", 64},
    {"k=kivi4,v=int2_g32", 64},
    {"k=int4+mean,v=fp16", 64},
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

// Values that formats treat in ways of their own. A transform makes NaN of infinities, whose sign and payload are the
// processor's: with one there are none.
void AddSpecialValues(CacheHarness& harness) {
  const formats::LayerScheme& layer = harness.layout().layers[0];
  const float infinity = std::numeric_limits<float>::infinity();
  for (CacheHarness::Sequence& sequence : harness.sequences()) {
    for (std::vector<float>* rows : {&sequence.k, &sequence.v}) {
      const bool hadamard = rows == &sequence.k ? layer.k.hadamard : layer.v.hadamard;
      const std::vector<float> specials = {0.0F,
                                           -0.0F,
                                           1e-30F,
                                           -1e-40F,
                                           3e4F,
                                           -7e4F,
                                           1e6F,
                                           448.0F,
                                           hadamard ? 1.0F : infinity,
                                           hadamard ? 2.0F : -infinity,
                                           hadamard ? 3.0F : std::nanf("")};
      for (size_t i = 0; i < specials.size(); ++i) (*rows)[(i * 977 + 13) % rows->size()] = specials[i];
      const size_t row = static_cast<size_t>(harness.options().head_dim);
      std::fill_n(rows->begin() + static_cast<int64_t>(5 * row), row, 0.0F);  // scales of zero
    }
  }
}

// Prefill, decode, a chunk over pages, and pages that close: the bytes and the counts of the CPU's.
TEST_P(GpuAttentionTest, AppendWritesTheBytesOfTheCpu) {
  uint32_t seed = 1;
  for (const char* scheme : {"bf16", "fp8_e4m3", "int8", "int4", "int4+exact=none", "nvfp4", "nvfp4_4over6+exact=none",
                             "k=int8+mean,v=int8+exact=2", "nvfp4+hadamard+sink=2", "kivi4", "kivi2", "int5_g32+mean",
                             "int3_g32", "k=kivi4,v=int4_per_token_head", "mxfp4", "int4+outliers=4",
                             "k=int8+mean+outliers=10,v=fp8_e4m3", "kivi4+outliers=2"}) {
    HarnessOptions options{.scheme = scheme, .heads = 3, .kv_heads = 3, .page_size = 32, .static_scale = 0.37F};
    options.head_dim = seed % 2 == 0 ? 64 : 128;
    options.lengths = {150, 33};
    CacheHarness found(On(options), seed), expected(options, seed);
    ++seed;
    for (CacheHarness* harness : {&found, &expected}) AddSpecialValues(*harness);
    const std::unique_ptr<Backend> gpu = Make(found);
    const std::unique_ptr<Backend> cpu = MakeReferenceBackend(expected.store(), expected.config());
    for (const Part& part : {Part{0, 70}, Part{1, 1}, Part{0, 1}, Part{1, 32}, Part{0, 79}}) {
      found.Append(*gpu, part);
      expected.Append(*cpu, part);
    }
    gpu->FetchCounts();
    const AppendCounts a = gpu->Counts(0), b = cpu->Counts(0);
    for (const int sequence : {0, 1}) ASSERT_EQ(found.Bytes(sequence), expected.Bytes(sequence)) << scheme;
    for (const auto& [x, y] : {std::pair{a.k, b.k}, {a.v, b.v}}) {
      EXPECT_EQ(x.values, y.values) << scheme;
      EXPECT_EQ(x.saturated, y.saturated) << scheme;
      EXPECT_EQ(x.nan, y.nan) << scheme;
      EXPECT_EQ(x.blocks, y.blocks) << scheme;
      EXPECT_EQ(x.zero_blocks, y.zero_blocks) << scheme;
    }
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

TEST_P(GpuAttentionTest, RareFormatsPairsAndHeadDims) {
  uint32_t seed = 150;
  for (const auto& [scheme, head_dim] : kRare) {
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

// Chunks of 16 tokens, next to each other of exact and stored pages; windows that end within.
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

TEST_P(GpuAttentionTest, WindowsSoftcapMeansAndPageRules) {
  uint32_t seed = 300;
  for (const char* scheme : kRules) {
    for (const int window : {0, 37}) {
      Check({.scheme = scheme,
             .heads = 4,
             .kv_heads = 2,
             .sliding_window = window,
             .softcap = window == 37 ? 5.0F : 0.0F,
             .lengths = {110, 40}},
            {{{0, 70}, {1, 5}}, {{0, 1}, {1, 1}}, {{1, 34}, {0, 39}}}, seed++);
    }
  }
}

TEST_P(GpuAttentionTest, LargeTinyAndZeroInputs) {
  for (const char* scheme : kFormats) {
    for (const float magnitude : {0.0F, 1e-6F, 30.0F}) {
      Check({.scheme = scheme, .magnitude = magnitude, .lengths = {70}}, {{{0, 65}}, {{0, 1}}, {{0, 4}}}, 400);
    }
  }
}

// Several runs: apart in a decode step, one after the other in one task, and merged.
TEST_P(GpuAttentionTest, LongContext) {
  for (const char* scheme : kFormats) {
    Check({.scheme = scheme, .heads = 4, .kv_heads = 1, .page_size = 64, .lengths = {2200}}, {{{0, 3}}, {{0, 1}}}, 500,
          2190);
  }
}

// The same rows token by token, in chunks beside others, and with runs kept together: the same bits.
TEST_P(GpuAttentionTest, ChunksBatchesAndCutsGiveTheSameBits) {
#ifdef KVANTA_SANITIZED
  const int before = 20;
#else
  const int before = 1060;  // beyond the first run
#endif
  std::vector<const char*> schemes(std::begin(kFormats), std::end(kFormats));
  for (const char* rare : {"k=kivi4,v=fp4_e2m1", "fp8_e5m2", "int4+outliers=4"}) schemes.push_back(rare);
  for (const char* scheme : schemes) {
    for (const int window : {0, 50}) {
      if (window != 0 && std::string_view(scheme) != "int4") continue;
      const HarnessOptions options =
          On({.scheme = scheme, .heads = 3, .kv_heads = 1, .sliding_window = window, .lengths = {before + 40, 20}});
      CacheHarness one(options, 7), two(options, 7);
      const std::unique_ptr<Backend> single = Make(one), batch = Make(two, 0);
      one.Append(*single, {0, before});
      two.Append(*batch, {0, before});
      for (int token = 0; token < 40; ++token) one.RunStep(*single, {{0, 1}});
      for (int token = 0; token < 20; ++token) one.RunStep(*single, {{1, 1}});
      two.Run(*batch, {{{1, 7}, {0, 25}}, {{0, 15}, {1, 13}}});
      gpu_->Check();
      for (const int index : {0, 1}) {
        const CacheHarness::Sequence& a = one.sequences()[static_cast<size_t>(index)];
        const CacheHarness::Sequence& b = two.sequences()[static_cast<size_t>(index)];
        const int64_t first = (index == 0 ? before : 0) * one.OutWidth();
        for (int64_t i = first; i < a.start * one.OutWidth(); ++i) {
          const size_t at = static_cast<size_t>(i);
          ASSERT_EQ(a.out[at], b.out[at]) << scheme << " window " << window << " row " << i / one.OutWidth();
        }
        EXPECT_EQ(one.Bytes(index), two.Bytes(index)) << scheme;
      }
    }
  }
}

// A NaN in a value reaches the rows that see it, and no other: also within a tile.
TEST_P(GpuAttentionTest, NanStaysWithTheRowsThatSeeIt) {
  for (const char* scheme : {"bf16", "fp8_e4m3", "fp8_e5m2"}) {
    const HarnessOptions options =
        On({.scheme = scheme, .heads = 2, .kv_heads = 2, .sliding_window = 20, .lengths = {80}});
    CacheHarness clean(options, 11), dirty(options, 11);
    constexpr int kToken = 37;
    dirty.sequences()[0].v[static_cast<size_t>(kToken * dirty.KvWidth() + 64 + 5)] = std::nanf("");  // KV head 1
    const std::unique_ptr<Backend> first = Make(clean), second = Make(dirty);
    clean.RunStep(*first, {{0, 80}});
    dirty.RunStep(*second, {{0, 80}});
    for (int token = 0; token < 80; ++token) {
      for (int channel = 0; channel < 128; ++channel) {
        const size_t index = static_cast<size_t>(token * clean.OutWidth() + channel);
        if (channel == 64 + 5 && token >= kToken && token < kToken + 20) {
          ASSERT_TRUE(std::isnan(dirty.sequences()[0].out[index])) << token;
        } else {
          ASSERT_EQ(clean.sequences()[0].out[index], dirty.sequences()[0].out[index]) << token << " " << channel;
        }
      }
    }
  }
}

TEST_P(GpuAttentionTest, RefusesWhatNoKernelDoes) {
  const auto error = [&](const HarnessOptions& options) -> std::string {
    CacheHarness harness(options, 1);
    try {
      Make(harness);
    } catch (const InputError& refused) {
      return refused.what();
    }
    return "none";
  };
  EXPECT_EQ(error(On({})), "none");
  EXPECT_THAT(error(On({.scheme = "mla_fp8"})), HasSubstr("latents"));
}

TEST(GpuWorkTest, SpreadsRunsUpToALimit) {
  const WorkShape shape{.heads = 40, .kv_heads = 2, .head_dim = 64, .sliding_window = 0};  // groups of 20
  Batch batch;
  batch.sequences.push_back({.span = {.start = 3000, .tokens = 2, .pages = nullptr}, .first_row = 0});
  GpuWork work;
  MakeGpuWork(shape, batch, {0}, 64, kMostSpreadRuns, work);
  ASSERT_EQ(work.tiles.size(), 2U * 2U * 2U);  // KV heads, tokens, 16 and 4 heads
  EXPECT_EQ(work.tasks.size(), 8U * 3U);
  EXPECT_EQ(work.slots, 8 * 3 * 16);
  MakeGpuWork(shape, batch, {0}, 64, 23, work);
  EXPECT_EQ(work.tasks.size(), 8U);
  EXPECT_EQ(work.tasks[0].last_run, 3);
  EXPECT_EQ(work.slots, 8 * 16);
}

}  // namespace
}  // namespace kvanta::attention
