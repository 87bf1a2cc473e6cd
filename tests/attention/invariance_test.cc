// Batch invariance: a row's bits depend only on its position and the bytes it reads, not on chunking, batch, threads,
// prefix hits or the contents of unused slots. Page bytes depend only on positions and values.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include "all_cases.h"
#include "attention/cache_harness.h"

namespace kvanta::attention {
namespace {

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Random steps in which several sequences advance by chunks of random length.
std::vector<Step> RandomBatches(std::mt19937& random, const std::vector<int>& lengths) {
  std::vector<int> left = lengths;
  std::vector<Step> steps;
  for (bool any = true; any;) {
    any = false;
    Step step;
    for (size_t i = 0; i < left.size(); ++i) {
      if (left[i] == 0) continue;
      any = true;
      if (std::uniform_int_distribution<int>(0, 2)(random) == 0) continue;
      const int tokens = std::uniform_int_distribution<int>(1, std::min(left[i], 40))(random);
      step.push_back({static_cast<int>(i), tokens});
      left[i] -= tokens;
    }
    std::shuffle(step.begin(), step.end(), random);
    if (!step.empty()) steps.push_back(step);
  }
  return steps;
}

class InvarianceTest : public ::testing::TestWithParam<std::tuple<testing::Unit, std::string>> {
 protected:
  const kernels::IsaTable& Isa() const { return *std::get<0>(GetParam()).table; }
  std::string Scheme() const { return std::get<1>(GetParam()); }
  // Page size for the format: tiles of 32 tokens need more than 16.
  int PageSize(int requested) const {
    return std::max(requested, formats::Find(KvScheme::Parse(Scheme()).k.format).scaling.token_group);
  }
  // Number of random cases; fewer for an emulated instruction set or processor, which is slow.
  int Cases() const {
    const std::string& unit = std::get<0>(GetParam()).name;
    if (unit.ends_with("_emulated")) return 4;
#ifdef KVANTA_CROSS_COMPILED
    return 2;
#endif
#ifdef KVANTA_SANITIZED
    return 6;  // sanitizers are many times slower and look for other faults
#else
    if (testing::AllCases()) return unit == "portable" ? 50 : 100;
    return unit == "portable" ? 10 : 20;
#endif
  }
  // Seed of the first random case: each format on each unit has others.
  uint32_t FirstSeed() const {
    uint32_t seed = 0;
    for (const char letter : std::get<0>(GetParam()).name + Scheme()) seed = seed * 31 + static_cast<uint8_t>(letter);
    return seed % 1'000'000 * 100;
  }
};

std::vector<std::string> Schemes() {
#ifdef KVANTA_SANITIZED  // sanitizers look for thread and memory faults, which do not depend on the format
  return {"bf16",         "fp8_e4m3",        "int8",      "int4+exact=2", "k=int5_g32,v=turboquant_3bit_nc", "nvfp4",
          "kivi2+sink=3", "int4+outliers=4", "int4+query"};
#endif
  std::vector<std::string> schemes;
  for (const formats::Format& format : formats::All()) schemes.emplace_back(format.name);
  schemes.insert(schemes.end(), {"k=int8,v=int4", "int4+exact=none", "fp8+exact=open", "int8+exact=open+sink=1",
                                 "int4+exact=2", "kivi2+exact=2+sink=3", "int4+outliers=4", "int8+mean+outliers=2",
                                 "int4+query+outliers=2", "0=int8,128=t3"});
  return schemes;
}

INSTANTIATE_TEST_SUITE_P(Units, InvarianceTest,
                         ::testing::Combine(::testing::ValuesIn(testing::Units()), ::testing::ValuesIn(Schemes())),
                         [](const auto& param) {
                           std::string name = std::get<0>(param.param).name + "_" + std::get<1>(param.param);
                           for (char& c : name) {
                             if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
                           }
                           return name;
                         });

// Sequences alone on one thread, and all in one step.
TEST_P(InvarianceTest, BothDirections) {
  const KvScheme scheme = KvScheme::Parse(Scheme());
  if (formats::Find(scheme.k.format).latents == formats::MlaSupport::kRequired || !scheme.ages.empty()) {
    GTEST_SKIP() << "refused";
  }
  for (const int window : {0, 9}) {
    HarnessOptions options{.scheme = Scheme(), .head_dim = 32, .page_size = PageSize(16)};
    options.sliding_window = window;
    options.both_directions = true;
    options.lengths = {70, 1, 33};
    CacheHarness one(options, FirstSeed()), all(options, FirstSeed());
    const std::unique_ptr<Backend> serial = one.CpuBackend(Isa()), parallel = all.CpuBackend(Isa(), 4);
    for (int i = 0; i < 3; ++i) one.RunStep(*serial, {{i, options.lengths[static_cast<size_t>(i)]}});
    all.RunStep(*parallel, {{2, 33}, {0, 70}, {1, 1}});
    for (size_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(SameBits(one.sequences()[i].out, all.sequences()[i].out))
          << "sequence " << i << ", window " << window;
    }
  }
}

// Same sequences and cache: token by token on one thread, and random batches of random chunks on 1, 2 or 4 threads.
TEST_P(InvarianceTest, ChunksBatchesAndThreads) {
  for (uint32_t seed = FirstSeed(); seed < FirstSeed() + static_cast<uint32_t>(Cases()); ++seed) {
    std::mt19937 random(seed);
    const auto pick = [&](std::initializer_list<int> values) {
      return values.begin()[std::uniform_int_distribution<size_t>(0, values.size() - 1)(random)];
    };
    HarnessOptions options{.scheme = Scheme(), .head_dim = 32, .page_size = PageSize(pick({16, 16, 32, 64}))};
    options.kv_heads = pick({1, 2});
    options.heads = options.kv_heads * pick({1, 2, 3, 4, 5, 7, 8});
    options.sliding_window = pick({0, 0, 0, 7, 40});
    options.chunk = options.sliding_window == 0 ? pick({0, 0, 24}) : 0;
    options.softcap = seed % 8 == 0 ? 4.0f : 0.0f;
    options.sinks = seed % 3 == 0;
    options.lengths = {pick({30, 61, 80}), pick({1, 17, 40}), pick({16, 33})};
    SCOPED_TRACE(fmt::format("seed {}: heads {}/{}, page {}, window {}, chunk {}", seed, options.heads,
                             options.kv_heads, options.page_size, options.sliding_window, options.chunk));

    CacheHarness one(options, seed);
    const std::unique_ptr<Backend> serial = one.CpuBackend(Isa());
    for (size_t i = 0; i < options.lengths.size(); ++i) {
      for (int token = 0; token < options.lengths[i]; ++token) one.RunStep(*serial, {{static_cast<int>(i), 1}});
    }
    CacheHarness two(options, seed);
    const std::unique_ptr<Backend> parallel = two.CpuBackend(Isa(), pick({1, 2, 4}));
    two.Run(*parallel, RandomBatches(random, options.lengths));
    for (size_t i = 0; i < options.lengths.size(); ++i) {
      ASSERT_TRUE(SameBits(one.sequences()[i].out, two.sequences()[i].out)) << "sequence " << i;
      ASSERT_EQ(one.Bytes(static_cast<int>(i)), two.Bytes(static_cast<int>(i))) << "sequence " << i;
    }
  }
}

// Contexts of several KV splits: one task per tile in a prefill chunk, distributed over tasks and combined in a decode
// step.
TEST_P(InvarianceTest, RunsSpreadOverThreads) {
  const int length = Cases() < 20 ? 1100 : 2500;
  for (const int window : {0, 1500}) {
    const HarnessOptions options{.scheme = Scheme(),
                                 .heads = 3,
                                 .kv_heads = 1,
                                 .head_dim = 32,
                                 .page_size = 64,
                                 .sliding_window = window,
                                 .sinks = window != 0,
                                 .lengths = {length}};
    CacheHarness one(options, 5);
    const std::unique_ptr<Backend> serial = one.CpuBackend(Isa(), 1);
    one.Append(*serial, {0, length - 40});
    one.RunStep(*serial, {{0, 40}});
    CacheHarness two(options, 5);
    const std::unique_ptr<Backend> parallel = two.CpuBackend(Isa(), 4);
    two.Append(*parallel, {0, length - 40});
    for (int token = 0; token < 40; ++token) two.RunStep(*parallel, {{0, 1}});
    const int64_t first = (length - 40) * one.OutWidth();
    ASSERT_EQ(std::memcmp(one.sequences()[0].out.data() + first, two.sequences()[0].out.data() + first,
                          sizeof(float) * static_cast<size_t>(40 * one.OutWidth())),
              0)
        << "window " << window;
    EXPECT_EQ(one.Bytes(0), two.Bytes(0));
  }
}

// A step of many sequences: threads take batches of tasks and prefetch the next task's pages.
TEST_P(InvarianceTest, ManySequencesOfAStep) {
  constexpr int kSequences = 140;
  HarnessOptions options{
      .scheme = Scheme(), .heads = 4, .kv_heads = 2, .head_dim = 32, .page_size = PageSize(16), .lengths = {}};
  for (int i = 0; i < kSequences; ++i) options.lengths.push_back(1 + i * 7 % 40);
  CacheHarness one(options, 7), two(options, 7);
  const std::unique_ptr<Backend> alone = one.CpuBackend(Isa()), together = two.CpuBackend(Isa());
  Step step;
  for (int i = 0; i < kSequences; ++i) {
    const int before = options.lengths[static_cast<size_t>(i)] - 1;
    if (before > 0) one.Append(*alone, {i, before});
    if (before > 0) two.Append(*together, {i, before});
    one.RunStep(*alone, {{i, 1}});
    step.push_back({i, 1});
  }
  two.RunStep(*together, step);
  for (size_t i = 0; i < kSequences; ++i) {
    const std::vector<float>&a = one.sequences()[i].out, &b = two.sequences()[i].out;
    const auto last = static_cast<size_t>(one.OutWidth());
    ASSERT_EQ(std::memcmp(a.data() + a.size() - last, b.data() + b.size() - last, last * sizeof(float)), 0) << i;
  }
}

// Head and page sizes that kernels process in whole tiles, for rows of a prefill chunk and of a decode step.
TEST_P(InvarianceTest, HeadsOfWholeTiles) {
  constexpr int kLength = 400, kLast = 40;  // some pages close in the last steps
  for (const auto& [page, head_dim, heads] : {std::tuple(64, 128, 4), std::tuple(128, 64, 5)}) {
    const HarnessOptions options{.scheme = Scheme(),
                                 .heads = heads,
                                 .kv_heads = 1,
                                 .head_dim = head_dim,
                                 .page_size = page,
                                 .lengths = {kLength}};
    CacheHarness one(options, 6);
    const std::unique_ptr<Backend> chunk = one.CpuBackend(Isa());
    one.Append(*chunk, {0, kLength - kLast});
    one.RunStep(*chunk, {{0, kLast}});
    CacheHarness two(options, 6);
    const std::unique_ptr<Backend> steps = two.CpuBackend(Isa());
    two.Append(*steps, {0, kLength - kLast});
    for (int token = 0; token < kLast; ++token) two.RunStep(*steps, {{0, 1}});
    ASSERT_TRUE(SameBits(one.sequences()[0].out, two.sequences()[0].out)) << "head of " << head_dim;
    ASSERT_EQ(one.Bytes(0), two.Bytes(0)) << "head of " << head_dim;
  }
}

// Unused slots and freed records do not affect the output: NaN bytes and zero bytes give the same, finite rows.
TEST_P(InvarianceTest, UnusedSlotsDoNotMatter) {
  for (const int length : {1, 2, 3, 5, 14, 19, 35}) {
    HarnessOptions options{.scheme = Scheme(),
                           .heads = 4,
                           .kv_heads = 2,
                           .head_dim = length % 2 == 0 ? 32 : 64,
                           .page_size = PageSize(16),
                           .lengths = {length, 40}};
    CacheHarness poisoned(options, 9);
    const std::unique_ptr<Backend> first = poisoned.CpuBackend(Isa());
    options.poison = false;
    CacheHarness clean(options, 9);
    const std::unique_ptr<Backend> second = clean.CpuBackend(Isa());
    for (const Step& step : {Step{{1, 17}}, Step{{0, length}, {1, 23}}}) {
      poisoned.RunStep(*first, step);
      clean.RunStep(*second, step);
    }
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(SameBits(poisoned.sequences()[i].out, clean.sequences()[i].out)) << "length " << length;
      for (const float x : poisoned.sequences()[i].out) ASSERT_TRUE(std::isfinite(x)) << "length " << length;
    }
  }
}

// A NaN in a key or value affects only the rows that see it.
TEST_P(InvarianceTest, NanStaysWithTheRowsThatSeeIt) {
  const formats::Format& keys = formats::Find(KvScheme::Parse(Scheme()).k.format);
  const HarnessOptions options{.scheme = Scheme(),
                               .heads = 2,
                               .kv_heads = 2,
                               .head_dim = 32,
                               .page_size = std::max(32, keys.scaling.token_group),
                               .sliding_window = 20,
                               .lengths = {80}};
  CacheHarness clean(options, 11);
  CacheHarness dirty(options, 11);
  constexpr int kToken = 37;
  const bool latents = clean.layout().layers[0].SharesCell();
  const bool keeps_nan = Scheme() == "fp32" || Scheme() == "bf16" || Scheme() == "fp16" || Scheme() == "fp8_e4m3" ||
                         Scheme() == "fp8_e5m2";
  CacheHarness::Sequence& sequence = dirty.sequences()[0];
  if (latents) {  // shared by both heads: a row that sees the NaN is NaN in all channels
    sequence.k[static_cast<size_t>(kToken * dirty.KvWidth() + 5)] = std::nanf("");
  } else {
    sequence.v[static_cast<size_t>(kToken * dirty.KvWidth() + 32 + 5)] = std::nanf("");  // KV head 1
  }
  const std::unique_ptr<Backend> first = clean.CpuBackend(Isa());
  const std::unique_ptr<Backend> second = dirty.CpuBackend(Isa());
  clean.RunStep(*first, {{0, 80}});
  dirty.RunStep(*second, {{0, 80}});
  for (int token = 0; token < 80; ++token) {
    for (int channel = 0; channel < 64; ++channel) {
      const size_t index = static_cast<size_t>(token * clean.OutWidth() + channel);
      const bool sees = (latents || channel >= 32) && token >= kToken && token < kToken + 20;
      if (!sees) {
        ASSERT_EQ(clean.sequences()[0].out[index], dirty.sequences()[0].out[index]) << token << " " << channel;
      } else if (keeps_nan && channel == 37) {
        ASSERT_TRUE(std::isnan(dirty.sequences()[0].out[index])) << token;
      }
    }
  }
  EXPECT_GE((latents ? second->Counts(0).k : second->Counts(0).v).nan, 1);
  EXPECT_EQ((latents ? second->Counts(0).v : second->Counts(0).k).nan, 0);
}

}  // namespace
}  // namespace kvanta::attention
