// The prefix cache on a disk that goes away, cannot be written, hangs or is slow, and under several engines.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/engine_impl.h"
#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

// An engine's, whose reads from disk do not end while `hangs`.
EngineComponents HangingComponents(const EngineConfig& config, const std::atomic<bool>& hangs) {
  EngineComponents components = LoadComponents(config);
  components.before_read = [&hangs] {
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  return components;
}

TEST_F(DiskTierTest, AFolderThatGoesAwayIsMadeAgain) {
  EngineConfig config = StoredConfig(folder_.Path() + "/cache");
  Engine engine(config);
  const std::vector<float> cold = StoredLogits(engine, tokens_).logits;
  engine.FlushPrefixCache();
  fs::remove_all(config.kv_cache_dir);
  engine.ResetPrefixCache();
  const Scored run = StoredLogits(engine, tokens_);
  EXPECT_EQ(run.cached, 0);
  EXPECT_EQ(run.logits, cold);
  StoredLogits(engine, Tokens(2, 100));
  engine.FlushPrefixCache();
  EXPECT_GE(RecordFiles(config.kv_cache_dir).size(), 6u);
}

TEST_F(DiskTierTest, AFolderThatCannotBeWrittenIsToldOnceAndTriedAgain) {
  std::vector<std::string> warnings;
  EngineConfig config = StoredConfig(folder_.Path() + "/cache");
  config.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  Engine engine(config);
  fs::remove_all(config.kv_cache_dir);
  std::ofstream(config.kv_cache_dir) << "a file in its place";
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(RunOne(engine, GreedyRequest("r", Tokens(static_cast<uint64_t>(i), 100))).error, "");
    engine.FlushPrefixCache();
  }
  RunOne(engine, GreedyRequest("last", Tokens(9, 20)));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("Not a directory"), std::string::npos) << warnings[0];
  EXPECT_GT(engine.Stats().disk.write_errors, 0);
  EXPECT_GT(engine.Stats().disk.dropped_records, 0);
  fs::remove(config.kv_cache_dir);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // the first pause
  RunOne(engine, GreedyRequest("again", Tokens(0, 100)));        // a hit in memory: written after all
  engine.FlushPrefixCache();
  EXPECT_GE(RecordFiles(config.kv_cache_dir).size(), 6u);
}

TEST_F(DiskTierTest, AFolderThatCannotBeIsAnInputError) {
  const std::string file = folder_.Path() + "/file";
  std::ofstream(file) << "x";
  EXPECT_THROW(Engine(StoredConfig(file)), InputError);
  EXPECT_THROW(Engine(StoredConfig(file + "/below")), InputError);
  EngineConfig config = StoredConfig(folder_.Path());
  config.enable_prefix_caching = false;
  EXPECT_THROW(Engine{config}, InputError);
}

// A read that hangs: the request that waits for it is computed in the end, others do not wait at all.
TEST_F(DiskTierTest, AHangingDiskHoldsNobodyUpForLong) {
  const std::vector<float> cold = Fill();
  std::atomic<bool> hangs = true;
  std::vector<std::string> warnings;
  EngineConfig config = StoredConfig(folder_.Path());
  config.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  Engine::Impl engine(HangingComponents(config, hangs));
  engine.Add(GreedyRequest("stored", tokens_, 2));
  engine.Add(GreedyRequest("other", Tokens(3, 40), 2));
  const double start = Now();
  std::map<std::string, double> ended;
  std::map<std::string, Collected> results;
  std::vector<RequestOutput> outputs;
  while (engine.Step(outputs)) {
    Collect(outputs, results);
    for (const auto& output : outputs) {
      if (output.finish != FinishReason::kNone) ended[output.id] = Now() - start;
    }
  }
  EXPECT_EQ(results["stored"].finish, FinishReason::kLength);
  EXPECT_LT(ended["other"], ended["stored"]);
  EXPECT_LT(ended["stored"], 8);
  EXPECT_EQ(warnings.size(), 1u);
  hangs = false;
  Engine alone(ConfigOf({"int4", false}));
  EXPECT_EQ(results["stored"].tokens, RunOne(alone, GreedyRequest("alone", tokens_, 2)).tokens);
}

TEST_F(DiskTierTest, AbortEndsARequestThatLoads) {
  Fill();
  std::atomic<bool> hangs = true;
  Engine::Impl engine(HangingComponents(StoredConfig(folder_.Path()), hangs));
  std::atomic<int> aborted = 0;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) aborted += output.finish == FinishReason::kAbort ? 1 : 0;
  });
  engine.Add(GreedyRequest("stored", tokens_));
  while (engine.Stats().loading == 0) std::this_thread::yield();
  engine.Abort("stored", "");
  while (aborted == 0) std::this_thread::yield();
  EXPECT_EQ(engine.Stats().loading, 0);
  hangs = false;
  engine.Stop();
}

// Requests of timed-out clients end on time even while nothing else wakes the engine.
TEST_F(DiskTierTest, TimeoutsHoldWhileLoading) {
  Fill();
  std::atomic<bool> hangs = true;
  Engine::Impl engine(HangingComponents(StoredConfig(folder_.Path()), hangs));
  Request request = GreedyRequest("stored", tokens_);
  request.timeout_seconds = 0.05;
  EXPECT_EQ(RunOne(engine, request).finish, FinishReason::kTimeout);
  hangs = false;
}

// Once both are measured, what is cheaper to compute is not loaded.
TEST_F(DiskTierTest, PagesOfASlowDiskAreComputed) {
  Fill();
  std::atomic<int> reads = 0;
  EngineConfig config = StoredConfig(folder_.Path());
  config.max_num_batched_tokens = 128;
  EngineComponents components = LoadComponents(config);
  components.before_read = [&] {
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
  };
  Engine::Impl engine(std::move(components));
  EXPECT_EQ(RunOne(engine, GreedyRequest("first", tokens_, 1)).cached_tokens, 96);  // nothing is measured yet
  RunOne(engine, GreedyRequest("measures", Tokens(5, 100), 1));
  engine.ResetPrefixCache();
  EXPECT_EQ(RunOne(engine, GreedyRequest("tries again", tokens_, 1)).finish, FinishReason::kLength);
  engine.ResetPrefixCache();
  const int before = reads;
  EXPECT_EQ(RunOne(engine, GreedyRequest("computes", tokens_, 1)).cached_tokens, 0);
  EXPECT_EQ(reads, before);
  EXPECT_GT(engine.Stats().disk.declined_tokens, 0);
}

TEST_F(DiskTierTest, TwoEnginesWriteAndReadOneFolder) {
  Engine first(StoredConfig(folder_.Path()));
  Engine second(StoredConfig(folder_.Path()));
  std::vector<Scored> runs(2);
  std::thread thread([&] { runs[0] = StoredLogits(first, tokens_); });
  runs[1] = StoredLogits(second, tokens_);
  thread.join();
  EXPECT_TRUE(SameRows(runs[0].logits, runs[1].logits, std::max(runs[0].cached, runs[1].cached)));
  first.FlushPrefixCache();
  second.FlushPrefixCache();
  for (Engine* engine : {&first, &second}) {
    engine->ResetPrefixCache();
    EXPECT_EQ(StoredLogits(*engine, tokens_).cached, 96);
  }
  EXPECT_TRUE(VerifyCacheFolder(folder_.Path())[0].damaged.empty());
}

}  // namespace
}  // namespace kvanta::engine
