// Pages of a GPU that are kept in the host's memory, emulated and (where there is one) real: a hit has the bits of a
// cold run, the memory stays within its bytes, and the folder below gets every page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "emulated/gpus.h"
#include "emulated/guarded_device.h"
#include "engine/engine_impl.h"
#include "engine/stored_prefixes.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

using ::testing::HasSubstr;

constexpr int kUsers = 4;
constexpr int64_t kPrompt = 70;  // tokens: two pages of 32 are kept
constexpr int64_t kKept = 64;

struct OffloadCase {
  const char* format;
  bool hybrid = false;  // a window in the second layer: two KV cache groups
};

const TinyModel& ModelOf(const OffloadCase& what) {
  static const TinyModel full({.heads = 2, .kv_heads = 1, .head_dim = 64, .intermediate_size = 96});
  static const TinyModel hybrid(
      {.heads = 2, .kv_heads = 1, .head_dim = 64, .intermediate_size = 96, .sliding_window = 40, .full_layers = 1});
  static const TinyModel latents({.rank = 64});
  if (what.hybrid) return hybrid;
  const formats::Format& keys = formats::Find(KvScheme::Parse(what.format).k.format);
  return keys.latents == formats::MlaSupport::kRequired ? latents : full;
}

class GpuOffloadTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  // GPU memory for `prompts` prompts with a few tokens after each, RAM for `kept` of them.
  static EngineConfig Config(const OffloadCase& what, int prompts, int kept) {
    EngineConfig config = TinyConfig(ModelOf(what), what.format);
    config.dtype = "bfloat16";
    config.page_size = 32;
    config.max_num_batched_tokens = 63;  // too few to measure: all that is found is loaded
    config.device = "cuda";
    const CachePlan plan = PlanCacheBytes(config);
    const int64_t prompt_bytes = 4 * plan.page_bytes + plan.exact_pages_per_sequence * plan.exact_page_bytes;
    config.kv_cache_memory_bytes = prompts * prompt_bytes;
    config.kv_offload_bytes = kept * (4 * plan.page_bytes + 4 * plan.exact_page_bytes);
    return config;
  }
  std::unique_ptr<Engine::Impl> Make(const EngineConfig& config) const {
    return std::make_unique<Engine::Impl>(LoadComponents(config, gpu_));
  }
  std::unique_ptr<Engine::Impl> MakeCold(EngineConfig config) const {
    config.enable_prefix_caching = false;
    config.kv_offload_bytes = 0;
    config.kv_cache_memory_bytes = 4 << 20;
    return Make(config);
  }
  static std::vector<int32_t> Prompt(int user) {
    std::mt19937_64 random(70 + static_cast<uint64_t>(user));
    return RandomTokens(random, kPrompt);
  }
  static Request UserRequest(int user) {
    Request request = GreedyRequest(std::to_string(user), Prompt(user), 4);
    request.sampling.logprobs = 1;
    if (user % 2 == 1) request.sampling.temperature = 0.9F;
    request.sampling.seed = user;
    return request;
  }
  static std::string ErrorOf(const EngineConfig& config, const std::shared_ptr<kernels::CudaContext>& gpu) {
    try {
      const Engine::Impl engine(LoadComponents(config, gpu));
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuOffloadTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

Scored Score(Engine::Impl& engine, const std::vector<int32_t>& tokens, int chunk = 0) {
  Scored run;
  run.logits.resize(tokens.size() * kVocab);
  run.cached = engine.Logits(tokens, chunk, run.logits, true);
  return run;
}

// More users than the GPU's memory holds come again: all of their pages are in RAM.
TEST_P(GpuOffloadTest, AHitFromRamHasTheBitsOfAColdRun) {
  constexpr OffloadCase kCases[] = {{"int4"},
#ifndef KVANTA_SANITIZED
                                    {"bf16"},
                                    {"fp8_e4m3"},
                                    {"kivi4+exact=2"},
                                    {"int5_g32+exact=2+sink=2"},
                                    {"mla_int4"},
                                    {"mla_fp8"},
                                    {"int4", true},
                                    {"int5_g32+exact=2+sink=2", true}
#endif
  };
  for (const OffloadCase& what : kCases) {
    SCOPED_TRACE(std::string(what.format) + (what.hybrid ? " with a window" : ""));
    const EngineConfig config = Config(what, 1, kUsers);
    EngineConfig ample = config;
    ample.kv_cache_memory_bytes = 4 << 20;
    ample.kv_offload_bytes = 0;
    const std::unique_ptr<Engine::Impl> engine = Make(config), memory = Make(ample);
    std::vector<std::vector<float>> expected;
    std::vector<int64_t> kept;  // tokens of a hit in the GPU's memory
    for (int user = 0; user < kUsers; ++user) {
      expected.push_back(Score(*memory, Prompt(user)).logits);
      kept.push_back(Score(*memory, Prompt(user)).cached);
      const Scored run = Score(*engine, Prompt(user));
      EXPECT_EQ(run.cached, 0);
      ASSERT_TRUE(SameRows(expected.back(), run.logits, 0));
      engine->FlushPrefixCache();
    }
    EXPECT_EQ(engine->Stats().host.hit_tokens, 0);
    EXPECT_GT(engine->Stats().prefix_evictions, 0);
    for (const int user : {2, 0, 3, 1}) {
      const Scored run = Score(*engine, Prompt(user), user % 2 == 0 ? 0 : 17);
      EXPECT_EQ(run.cached, kept[static_cast<size_t>(user)]) << user;
      EXPECT_GE(run.cached, kKept / 2);
      ASSERT_TRUE(SameRows(expected[static_cast<size_t>(user)], run.logits, run.cached)) << user;
    }
    const CacheTierStats host = engine->Stats().host;
    EXPECT_GE(host.hit_tokens, kUsers * kKept / 2) << "a page may still be in the GPU's memory";
    EXPECT_LE(host.bytes, config.kv_offload_bytes);
    EXPECT_GT(host.read_bytes, 0);
    EXPECT_EQ(host.dropped_records + host.read_errors + host.write_errors + host.damaged_files, 0);
  }
}

// Requests, three at once, of users whose prompts exceed the GPU's memory and the RAM as well.
TEST_P(GpuOffloadTest, TokensAreThoseOfAColdRunWithinBothLimits) {
#ifdef KVANTA_SANITIZED
  constexpr size_t kRequests = 8;
#else
  constexpr size_t kRequests = 24;
#endif
  const OffloadCase what{"int5_g32+exact=2+sink=2", true};
  const EngineConfig config = Config(what, 2, 2);
  const std::unique_ptr<Engine::Impl> engine = Make(config), cold = MakeCold(config);
  std::map<int, Collected> expected;
  for (int user = 0; user < 2 * kUsers; ++user) expected[user] = RunOne(*cold, UserRequest(user));
  std::mt19937_64 random(5);
  std::map<std::string, Collected> results;
  std::vector<RequestOutput> outputs;
  std::vector<int> user_of;
  for (bool has_work = true; has_work || user_of.size() < kRequests;) {
    while (user_of.size() < kRequests && engine->Stats().running + engine->Stats().waiting < 3) {
      user_of.push_back(static_cast<int>(random() % (2 * kUsers)));
      Request request = UserRequest(user_of.back());
      request.id = std::to_string(user_of.size() - 1);
      engine->Add(std::move(request));
    }
    has_work = engine->Step(outputs);
    Collect(outputs, results);
    engine->FlushPrefixCache();
    const EngineStats stats = engine->Stats();
    ASSERT_LE(stats.host.bytes, config.kv_offload_bytes);
    ASSERT_LE(stats.cache_used_bytes, stats.cache_budget_bytes);
  }
  for (size_t i = 0; i < user_of.size(); ++i) {
    const Collected& got = results.at(std::to_string(i));
    ASSERT_EQ(got.error, "");
    ASSERT_EQ(got.tokens, expected[user_of[i]].tokens) << i;
    ASSERT_TRUE(Same(got.logprobs, expected[user_of[i]].logprobs)) << i;
  }
#ifndef KVANTA_SANITIZED
  EXPECT_GT(engine->Stats().host.hit_tokens, 0);
  EXPECT_GT(engine->Stats().host.evictions, 0);
#endif
  EXPECT_EQ(engine->Stats().loading, 0);
  engine->ResetPrefixCache();
  EXPECT_EQ(engine->Stats().cache_used_bytes, 0) << "references leaked";
}

// The nearest tier is asked first; the folder gets every page, and fills the RAM of the next process.
TEST_P(GpuOffloadTest, TheFolderBelowGetsEveryPage) {
  const weights::TempFolder folder;
  EngineConfig config = Config({"int4"}, 1, kUsers);
  config.kv_cache_dir = folder.Path();
  const std::unique_ptr<Engine::Impl> cold = MakeCold(Config({"int4"}, 1, kUsers));
  const auto check = [&](Engine::Impl& engine, int user) {
    const Scored run = Score(engine, Prompt(user));
    EXPECT_EQ(run.cached, kKept) << user;
    EXPECT_TRUE(SameRows(ColdLogits(*cold, Prompt(user)), run.logits, run.cached)) << user;
  };
  {
    const std::unique_ptr<Engine::Impl> engine = Make(config);
    for (int user = 0; user < kUsers; ++user) Score(*engine, Prompt(user));
    engine->FlushPrefixCache();
    EXPECT_EQ(RecordFiles(folder.Path()).size(), static_cast<size_t>(2 * kUsers));
    check(*engine, 0);
    EXPECT_EQ(engine->Stats().host.hit_tokens, kKept);
    EXPECT_EQ(engine->Stats().disk.lookup_tokens, kUsers * kKept) << "of the cold prompts alone";
    EXPECT_EQ(engine->Stats().disk.hit_tokens, 0);
  }
  const std::unique_ptr<Engine::Impl> again = Make(config);
  for (int user = 0; user < kUsers; ++user) check(*again, user);
  EXPECT_EQ(again->Stats().disk.hit_tokens, kUsers * kKept);
  EXPECT_EQ(again->Stats().host.hit_tokens, 0);
  again->FlushPrefixCache();
  const int64_t files = std::ssize(RecordFiles(folder.Path()));
  for (int user = 0; user < kUsers; ++user) check(*again, user);
  EXPECT_EQ(again->Stats().host.hit_tokens, kUsers * kKept)
      << "what was read from disk has been copied when it was used";
  EXPECT_EQ(std::ssize(RecordFiles(folder.Path())), files);
}

// Pages are copied from page-locked memory, and those of the folder from other memory.
TEST_P(GpuOffloadTest, CopiesComeFromPageLockedMemory) {
  if (!emulated_) GTEST_SKIP() << "copies are counted by the emulation";
  const auto& device = dynamic_cast<const testing::GuardedDevice&>(gpu_->device());
  const std::unique_ptr<Engine::Impl> engine = Make(Config({"int4"}, 1, kUsers));
  for (int user = 0; user < kUsers; ++user) Score(*engine, Prompt(user));
  engine->FlushPrefixCache();
  EXPECT_EQ(device.AsyncBytes(), 0);
  Score(*engine, Prompt(0));
  EXPECT_GT(device.PageLockedBytes(), 0);
  EXPECT_EQ(device.PageLockedBytes(), engine->Stats().host.read_bytes);
  EXPECT_EQ(device.AsyncBytes(), device.PageLockedBytes());
}

// Measured scales change the pages, which are kept.
TEST_P(GpuOffloadTest, MeasuredScalesComeFirst) {
  EngineConfig config = Config({"int8"}, 1, kUsers);
  config.calculate_kv_scales = true;
  const std::unique_ptr<Engine::Impl> engine = Make(config);
  std::vector<Collected> first;
  for (int user = 0; user < 3; ++user) {
    first.push_back(RunOne(*engine, UserRequest(user)));
    engine->FlushPrefixCache();
  }
  const Collected again = RunOne(*engine, UserRequest(0));
  EXPECT_EQ(again.cached_tokens, kKept);
  EXPECT_EQ(again.tokens, first[0].tokens);
  EXPECT_GT(engine->Stats().host.hit_tokens, 0);
}

TEST_P(GpuOffloadTest, AnAbortEndsARequestThatLoads) {
  EngineComponents components = LoadComponents(Config({"int4"}, 1, kUsers), gpu_);
  std::atomic<bool> hangs = false;
  std::atomic<int> reads = 0, aborted = 0;
  components.before_read = [&] {
    ++reads;
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Engine::Impl engine(std::move(components));
  for (int user = 0; user < kUsers; ++user) Score(engine, Prompt(user));
  engine.FlushPrefixCache();
  hangs = true;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) aborted += output.finish == FinishReason::kAbort ? 1 : 0;
  });
  engine.Add(UserRequest(0));
  while (reads == 0) std::this_thread::yield();
  engine.Abort("0", "");
  while (aborted == 0) std::this_thread::yield();
  EXPECT_EQ(engine.Stats().loading, 0);
  hangs = false;
  engine.Stop();
  engine.ResetPrefixCache();
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
  EXPECT_EQ(RunOne(engine, UserRequest(1)).cached_tokens, kKept) << "the engine goes on";
}

TEST_P(GpuOffloadTest, SizesThatCannotBeAreErrors) {
  EngineConfig config = Config({"int4"}, 1, kUsers);
  config.kv_offload_bytes = 100;
  EXPECT_THAT(ErrorOf(config, gpu_), HasSubstr("kv_offload_bytes = 100: one page of 32 tokens takes "));
  config.kv_offload_bytes = int64_t{1} << 60;
  EXPECT_THAT(ErrorOf(config, gpu_),
              ::testing::MatchesRegex("kv_offload_bytes = 1152921504606846976: only [0-9]+ bytes "
                                      "of memory are available"));
  config.kv_offload_bytes = -1;
  EXPECT_THAT(ErrorOf(config, gpu_), HasSubstr("kv_offload_bytes = -1: must be at least 0"));
  config.kv_offload_bytes = 1 << 20;
  config.enable_prefix_caching = false;
  EXPECT_THAT(ErrorOf(config, gpu_), HasSubstr("kv_offload_bytes = 1048576: needs enable_prefix_caching"));
}

TEST(GpuOffload, IsNotForACpu) {
  for (const char* device : {"auto", "cpu"}) {
    EngineConfig config = TinyConfig(Model(), "int4");
    config.device = device;
    config.kv_offload_bytes = 1 << 20;
    try {
      const Engine engine(config);
      FAIL() << device;
    } catch (const InputError& error) {
      EXPECT_THAT(error.what(), HasSubstr("on a CPU the cache is in RAM: give these bytes to kv_cache_memory_bytes"));
    }
  }
}

}  // namespace
}  // namespace kvanta::engine
