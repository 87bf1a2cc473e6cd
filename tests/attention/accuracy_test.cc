// Accuracy of the CPU kernels, for every supported instruction set, against the double-precision reference on the same
// bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "all_cases.h"
#include "attention/accuracy_fixture.h"
#include "kernels/attention/cpu/table.h"
#include "tolerance.h"

namespace kvanta::attention {
namespace {

using ::testing::TestParamInfo;

// Schemes with every format on each side, paired with itself, a float and an integer format. Kernels are selected per
// side, so the full cross product would cover nothing more.
std::vector<std::string> Pairs() {
  std::vector<std::string> pairs;
  for (const formats::Format& format : formats::All()) {
    pairs.emplace_back(format.name);
    if (format.latents == formats::MlaSupport::kRequired) continue;
    for (const char* other : {"bf16", "fp8_e4m3", "int8", "int4"}) {
      pairs.push_back(fmt::format("k={},v={}", format.name, other));
      pairs.push_back(fmt::format("k={},v={}", other, format.name));
    }
  }
  return pairs;
}

// Smallest page size that is a multiple of the scheme's tiles.
int SmallestPage(const std::string& scheme) {
  return std::max(16, formats::Find(KvScheme::Parse(scheme).k.format).scaling.token_group);
}

INSTANTIATE_TEST_SUITE_P(Units, AccuracyTest, ::testing::ValuesIn(testing::AllUnits()),
                         [](const TestParamInfo<testing::Unit>& unit) { return unit.param.name; });

// A prefill, a decode step, and a chunk that crosses pages; each reads a page other than the first and the open one.
std::vector<Step> ThreeSteps(int page_size) {
  return {{{0, 2 * page_size + 5}}, {{0, 1}}, {{0, page_size + 4}}};
}
int ThreeStepsTokens(int page_size) {
  return 3 * page_size + 10;
}

TEST_P(AccuracyTest, EveryPairOfFormats) {
  uint32_t seed = 1;
  for (const std::string& scheme : Pairs()) {
    Check({.scheme = scheme,
           .heads = 3,
           .kv_heads = 1,
           .head_dim = 32,
           .page_size = SmallestPage(scheme),
           .static_scale = 0.37f,
           .lengths = {ThreeStepsTokens(SmallestPage(scheme))}},
          ThreeSteps(SmallestPage(scheme)), seed++);
  }
  for (const formats::Format& format : formats::All()) {
    EXPECT_TRUE(Compared(format.name, true)) << format.name;
    EXPECT_TRUE(Compared(format.name, false)) << format.name;
  }
}

TEST_P(AccuracyTest, EveryHeadDim) {
  uint32_t seed = 100;
  std::vector<std::string> schemes = {"k=int8+hadamard+query,v=int8+exact=open"};
  for (const formats::Format& format : formats::All()) schemes.emplace_back(format.name);
  constexpr int kHeadDims[] = {
      8, 16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 112, 120, 128, 192, 256, kernels::kMaxHeadDim};
  const std::vector<testing::Unit> units = testing::AllUnits();
  const auto unit = std::ranges::find(units, GetParam().name, &testing::Unit::name) - units.begin();
  for (size_t i = 0; i < schemes.size(); ++i) {
    const std::string& scheme = schemes[i];
    for (size_t j = 0; j < std::size(kHeadDims); ++j) {
      ++seed;
      // Each format on each unit with a third of the head sizes, in turn.
      if (!testing::AllCases() && (i + j + static_cast<size_t>(unit)) % 3 != 0) continue;
      const int head_dim = kHeadDims[j];
      Check({.scheme = scheme,
             .heads = 2,
             .kv_heads = 1,
             .head_dim = head_dim,
             .page_size = SmallestPage(scheme),
             .lengths = {ThreeStepsTokens(SmallestPage(scheme))}},
            ThreeSteps(SmallestPage(scheme)), seed);
    }
  }
}

TEST_P(AccuracyTest, EveryGroupOfHeads) {
  uint32_t seed = 200;
  for (const char* scheme : {"bf16", "fp8", "int8", "int4", "int5_g32", "nvfp4"}) {
    for (const auto& [heads, kv_heads] :
         {std::pair{1, 1}, {2, 2}, {4, 2}, {3, 1}, {8, 2}, {7, 1}, {8, 1}, {15, 1}, {71, 1}}) {
      Check({.scheme = scheme, .heads = heads, .kv_heads = kv_heads, .head_dim = 32, .lengths = {58}}, ThreeSteps(16),
            seed++);
    }
  }
}

TEST_P(AccuracyTest, EveryPageSizeWindowAndSoftcap) {
  uint32_t seed = 300;
  for (const char* scheme :
       {"bf16", "fp8_e5m2", "int8", "int4", "kivi2", "klt2_g64", "k=turboquant_3bit_nc,v=int6_g32"}) {
    for (const int page_size : {16, 32, 64, 128}) {
      if (page_size < SmallestPage(scheme)) continue;
      for (const auto& [window, chunk] :
           {std::pair{0, 0}, {1, 0}, {5, 0}, {33, 0}, {100, 0}, {0, 1}, {0, 40}, {0, 96}}) {
        Check({.scheme = scheme,
               .heads = 2,
               .kv_heads = 1,
               .head_dim = 32,
               .page_size = page_size,
               .sliding_window = window,
               .chunk = chunk,
               .softcap = window == 33 ? 5.0f : 0.0f,
               .lengths = {150}},
              {{{0, 90}}, {{0, 1}}, {{0, 59}}}, seed++);
      }
    }
  }
}

// Sequences of several pages in one step; the last one has more than one KV split.
TEST_P(AccuracyTest, BothDirections) {
  uint32_t seed = 350;
  for (const char* scheme : {"bf16", "int8", "int4", "kivi2+exact=2+sink=3", "nvfp4"}) {
    for (const int page_size : {32, 64}) {
      for (const int window : {0, 1, 5, 33, 100}) {
        Check({.scheme = scheme,
               .heads = 6,
               .kv_heads = 2,
               .head_dim = 32,
               .page_size = page_size,
               .sliding_window = window,
               .both_directions = true,
               .lengths = {150, 1, 64}},
              {{{0, 150}, {1, 1}, {2, 64}}}, seed++);
      }
    }
  }
  for (const int window : {0, 200}) {
    Check({.heads = 2,
           .head_dim = 32,
           .page_size = 64,
           .sliding_window = window,
           .both_directions = true,
           .lengths = {1100}},
          {{{0, 1100}}}, seed++);
  }
}

TEST_P(AccuracyTest, RaggedBatch) {
  uint32_t seed = 400;
  for (const formats::Format& format : formats::All()) {
    const std::string scheme(format.name);
    Check({.scheme = scheme, .page_size = SmallestPage(scheme), .lengths = {70, 3, 49, 17}},
          {{{0, 48}, {2, 16}}, {{0, 1}, {1, 2}, {2, 16}, {3, 17}}, {{1, 1}, {0, 21}, {2, 17}}}, seed++);
  }
}

TEST_P(AccuracyTest, KeyMeanWithAndWithoutSoftcap) {
  for (const char* scheme : {"k=int8+mean,v=int8", "k=int4+mean,v=int4", "k=bf16+mean,v=bf16"}) {
    for (const float softcap : {0.0f, 3.0f}) {
      Check({.scheme = scheme, .heads = 4, .head_dim = 64, .softcap = softcap, .lengths = {58}}, ThreeSteps(16), 500);
    }
  }
}

TEST_P(AccuracyTest, OutlierChannelsAndQueryAwareKeys) {
  uint32_t seed = 550;
  for (const char* scheme : {"int4+outliers=2", "int4+mean+outliers=4+exact=none", "fp8+outliers=8", "int8+outliers=32",
                             "k=kivi2+outliers=6,v=int4+exact=2+sink=2", "k=nvfp4+outliers=4,v=bf16", "int4+query",
                             "k=int5_g32+query+outliers=4,v=int4+exact=2+sink=2", "k=kivi2+hadamard+query,v=int4",
                             "k=fp16+hadamard+query,v=int8+exact=open"}) {
    for (const int window : {0, 33}) {
      Check({.scheme = scheme,
             .heads = 6,
             .kv_heads = 2,
             .head_dim = 32,
             .page_size = 32,
             .sliding_window = window,
             .softcap = window == 0 ? 3.0f : 0.0f,
             .lengths = {150}},
            {{{0, 90}}, {{0, 1}}, {{0, 59}}}, seed++);
    }
  }
}

// Rows whose padding no transform fills, and all that goes by the channels that there are.
TEST_P(AccuracyTest, PaddedRows) {
  uint32_t seed = 620;
  for (const char* scheme : {"int4", "int4-hadamard", "int4+query", "t3+query+outliers=2", "klt3", "klt2",
                             "k=t3-hadamard,v=t2-hadamard", "k=int4+mean,v=int8", "k=int8+mean,v=int4",
                             "k=nvfp4+outliers=4,v=kivi3", "k=turboquant_3bit_nc-hadamard,v=kivi2", "kivi2+hadamard",
                             "k=kivi3+outliers=2,v=turboquant_3bit_nc+exact=2+sink=2"}) {
    for (const int head_dim : {40, 72, 80}) {
      Check({.scheme = scheme,
             .heads = 6,
             .kv_heads = 2,
             .head_dim = head_dim,
             .page_size = 32,
             .sliding_window = head_dim == 72 ? 33 : 0,
             .softcap = head_dim == 40 ? 3.0f : 0.0f,
             .sinks = head_dim == 80,
             .lengths = {150}},
            {{{0, 90}}, {{0, 1}}, {{0, 59}}}, seed++);
    }
  }
  // Several KV splits, combined.
  Check({.scheme = "k=int8,v=int4", .heads = 5, .kv_heads = 1, .head_dim = 80, .page_size = 64, .lengths = {2200}},
        {{{0, 6}}, {{0, 1}}}, seed, 2190);
}

TEST_P(AccuracyTest, Sinks) {
  uint32_t seed = 650;
  for (const char* scheme : {"bf16", "fp8_e4m3", "int8", "int4", "nvfp4", "kivi4", "k=int8+mean,v=int8",
                             "k=int4+mean+hadamard,v=int4", "int4+query"}) {
    for (const auto& [window, softcap] : {std::pair{0, 0.0f}, {33, 0.0f}, {0, 3.0f}}) {
      Check({.scheme = scheme,
             .heads = 10,
             .kv_heads = 2,
             .head_dim = 32,
             .page_size = 32,
             .sliding_window = window,
             .softcap = softcap,
             .sinks = true,
             .lengths = {150}},
            {{{0, 90}}, {{0, 1}}, {{0, 59}}}, seed++);
    }
  }
  // Several KV splits: the sink counts once.
  Check(
      {.scheme = "int4", .heads = 5, .kv_heads = 1, .head_dim = 32, .page_size = 64, .sinks = true, .lengths = {2200}},
      {{{0, 6}}, {{0, 1}}}, seed, 2190);
}

// MLA: K and V share a cell of latents, followed by K's RoPE channels.
TEST_P(AccuracyTest, Latents) {
  uint32_t seed = 570;
  for (const formats::Format& format : formats::All()) {
    if (format.latents == formats::MlaSupport::kNo) continue;
    for (const auto& [rank, rope_dim] :
         {std::pair{512, 64}, {64, 16}, {32, 8}, {128, 2}, {256, 32}, {160, 256}, {40, 8}}) {
      const std::string scheme(format.name);
      const int page_size = seed % 2 == 0 ? 16 : 64;
      Check({.scheme = scheme,
             .heads = 3,
             .head_dim = rank,
             .rope_dim = rope_dim,
             .page_size = page_size,
             .sliding_window = rank == 64 ? 21 : 0,
             .softcap = rank == 32 ? 4.0f : 0.0f,
             .lengths = {ThreeStepsTokens(page_size)}},
            ThreeSteps(page_size), seed++);
    }
  }
}

TEST_P(AccuracyTest, LargeTinyAndZeroInputs) {
  for (const formats::Format& format : formats::All()) {
    for (const float magnitude : {0.0f, 1e-6f, 8.0f, 32.0f}) {
      const std::string scheme(format.name);
      const bool large = magnitude > 1;
      Check({.scheme = scheme,
             .heads = 2,
             .kv_heads = 1,
             .head_dim = large ? 64 : 32,
             .page_size = SmallestPage(scheme),
             .magnitude = magnitude,
             .axis_queries = large,
             .lengths = {ThreeStepsTokens(SmallestPage(scheme))}},
            ThreeSteps(SmallestPage(scheme)), 600);
    }
  }
}

// Realistic keys and queries: logits with standard deviation `sharpness`. Relative to attention over the unquantized
// values, a kernel's error is hardly larger than that of exact arithmetic on the same bytes.
TEST_P(AccuracyTest, SubbyteOperandsAddLittle) {
  for (const formats::Format& format : formats::All()) {
    if (!kernels::HasByteOperands(format.code) || format.latents == formats::MlaSupport::kRequired) continue;
    for (const float sharpness : {0.5f, 2.0f, 4.0f}) {
      const std::string scheme = std::string(format.name) + "-hadamard";  // random values need no Hadamard transform
      CacheHarness harness({.scheme = scheme, .heads = 4, .kv_heads = 1, .page_size = 64, .lengths = {256}}, 800);
      CacheHarness::Sequence& sequence = harness.sequences()[0];
      for (float& x : sequence.q) x *= sharpness;
      const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
      const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table, 2);
      harness.Append(*backend, {0, 192});
      harness.RunStep(*backend, {{0, 64}}, reference.get());
      double kernel = 0, exact = 0;
      for (int64_t row = 192 * 4; row < 256 * 4; ++row) {
        const std::vector<double> truth = ExactRow(harness, row);
        for (size_t c = 0; c < truth.size(); ++c) {
          const size_t index = static_cast<size_t>(row) * truth.size() + c;
          kernel += std::pow(sequence.out[index] - truth[c], 2);
          exact += std::pow(sequence.expected[index] - truth[c], 2);
        }
      }
      EXPECT_LE(std::sqrt(kernel), testing::kSubbyteErrorGrowth * std::sqrt(exact)) << scheme << " " << sharpness;
      EXPECT_GT(exact, 0);
    }
  }
}

// A cache whose rows are padded is as close to attention over the unquantized values as others are.
TEST_P(AccuracyTest, PaddedHeadsAreAsAccurate) {
  const auto error = [&](const std::string& scheme, int head_dim) {
    CacheHarness harness(
        {.scheme = scheme, .heads = 4, .kv_heads = 1, .head_dim = head_dim, .page_size = 32, .lengths = {128}}, 820);
    const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table, 2);
    harness.Append(*backend, {0, 96});
    harness.RunStep(*backend, {{0, 32}});
    double sum = 0;
    for (int64_t row = 96 * 4; row < 128 * 4; ++row) {
      const std::vector<double> truth = ExactRow(harness, row);
      for (size_t c = 0; c < truth.size(); ++c) {
        sum += std::pow(harness.sequences()[0].out[static_cast<size_t>(row) * truth.size() + c] - truth[c], 2);
      }
    }
    return std::sqrt(sum / head_dim);
  };
  for (const formats::Format& format : formats::All()) {
    if (format.latents == formats::MlaSupport::kRequired || formats::IsAllocated(format.code)) continue;
    if (format.code_bits >= 16) continue;
    const std::string scheme(format.name);
    const double of_64 = error(scheme, 64);
    for (const int head_dim : {40, 72, 80, 96, 112}) {
      EXPECT_LE(error(scheme, head_dim), 1.5 * of_64) << scheme << " " << head_dim;
    }
  }
}

// One query over 8,192 tokens: f32 sums do not drift.
TEST_P(AccuracyTest, LongContext) {
  for (const char* scheme : {"fp8", "int8", "int4", "nvfp4", "kivi4"}) {
    Check({.scheme = scheme, .heads = 4, .kv_heads = 1, .head_dim = 32, .page_size = 64, .lengths = {8200}},
          {{{0, 6}}, {{0, 1}}}, 700, 8190);
  }
}

}  // namespace
}  // namespace kvanta::attention
