// The prefix cache on a disk that goes away, cannot be written, hangs or is slow, and under several engines.
#include <gtest/gtest.h>

#include <sys/mount.h>

#include <atomic>
#include <thread>

#include "engine/hanging_disk.h"
#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

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
  const store::FakeClock clock;
  EngineOnFakeClock engine(config, clock);
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
  clock.Advance(1.1);                                      // the first pause
  RunOne(engine, GreedyRequest("again", Tokens(0, 100)));  // a hit in memory: written after all
  engine.FlushPrefixCache();
  EXPECT_GE(RecordFiles(config.kv_cache_dir).size(), 6u);
}

// With the role prefill, an answer waits until its pages are stored, and the engine goes on meanwhile.
TEST_F(DiskTierTest, PagesThatAreBeingWrittenDelayNoOtherRequest) {
  EngineConfig config = StoredConfig(folder_.Path() + "/cache");
  config.role = "prefill";
  const auto disk = std::make_shared<HangingDisk>();
  Engine::Impl engine(ComponentsWritingTo(disk, config));
  RunningOutputs outputs;
  engine.Start(outputs.Callback());
  engine.Add(GreedyRequest("stored", Tokens(1, 100)));
  while (disk->calls == 0) std::this_thread::yield();
  engine.Add({.id = "embedding", .prompt = Tokens(2, 20), .pooling = PoolingParams{}});
  outputs.WaitFor("embedding");
  engine.Add(GreedyRequest("another", Tokens(3, 100)));
  while (engine.Stats().prompt_tokens < 220) std::this_thread::yield();
  EXPECT_FALSE(outputs.HasEnded("stored"));
  EXPECT_FALSE(outputs.HasEnded("another"));
  disk->hangs = false;
  EXPECT_EQ(outputs.WaitFor("stored").tokens.size(), 1u);
  EXPECT_EQ(outputs.WaitFor("another").tokens.size(), 1u);
  EXPECT_GE(RecordFiles(config.kv_cache_dir).size(), 12u);
  disk->hangs = true;
  engine.Add(GreedyRequest("drained", Tokens(4, 100)));
  while (disk->calls < 1000 && engine.Stats().prompt_tokens < 320) std::this_thread::yield();
  std::jthread recovery([&] { disk->hangs = false; });
  engine.Stop(true);
  EXPECT_TRUE(outputs.HasEnded("drained"));
}

// A place that hangs keeps no answer for ever.
TEST_F(DiskTierTest, AnswersOfAPrefillReplicaComeWhileTheDiskHangs) {
  EngineConfig config = StoredConfig(folder_.Path() + "/cache");
  config.role = "prefill";
  const auto disk = std::make_shared<HangingDisk>();
  Engine::Impl engine(ComponentsWritingTo(disk, config));
  engine.Add(GreedyRequest("stored", Tokens(1, 100)));
  std::vector<RequestOutput> outputs;
  std::map<std::string, Collected> results;
  while (results["stored"].finish == FinishReason::kNone) {
    ASSERT_TRUE(engine.Step(outputs));
    Collect(outputs, results);
    disk->pace = 1;
  }
  EXPECT_EQ(results["stored"].tokens.size(), 1u);
  EXPECT_FALSE(engine.Step(outputs));
  disk->hangs = false;
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
  const auto disk = std::make_shared<HangingDisk>();
  std::vector<std::string> warnings;
  EngineConfig config = StoredConfig(folder_.Path());
  config.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  Engine::Impl engine(ComponentsOn(disk, config));
  RunningOutputs outputs;
  engine.Add(GreedyRequest("stored", tokens_, 2));
  engine.Add(GreedyRequest("other", Tokens(3, 40), 2));
  engine.Start(outputs.Callback());
  outputs.WaitFor("other");
  while (disk->calls == 0) std::this_thread::yield();
  disk->clock.Advance(1.9);
  outputs.WaitForSteps(engine);
  EXPECT_FALSE(outputs.HasEnded("stored")) << "a read may take a while";
  disk->clock.Advance(0.2);
  const Collected stored = outputs.WaitFor("stored");
  EXPECT_EQ(stored.finish, FinishReason::kLength);
  EXPECT_EQ(stored.cached_tokens, 0);
  engine.Stop();
  EXPECT_EQ(warnings.size(), 1u);
  disk->hangs = false;
  Engine alone(ConfigOf({"int4", false}));
  EXPECT_EQ(stored.tokens, RunOne(alone, GreedyRequest("alone", tokens_, 2)).tokens);
}

TEST_F(DiskTierTest, AbortEndsARequestThatLoads) {
  Fill();
  const auto disk = std::make_shared<HangingDisk>();
  Engine::Impl engine(ComponentsOn(disk, StoredConfig(folder_.Path())));
  std::atomic<int> aborted = 0;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) aborted += output.finish == FinishReason::kAbort ? 1 : 0;
  });
  engine.Add(GreedyRequest("stored", tokens_));
  while (engine.Stats().loading == 0) std::this_thread::yield();
  engine.Abort("stored", "");
  while (aborted == 0) std::this_thread::yield();
  EXPECT_EQ(engine.Stats().loading, 0);
  disk->hangs = false;
  engine.Stop();
}

// Requests of timed-out clients end on time even while nothing else wakes the engine.
TEST_F(DiskTierTest, TimeoutsHoldWhileLoading) {
  Fill();
  const auto disk = std::make_shared<HangingDisk>();
  Engine::Impl engine(ComponentsOn(disk, StoredConfig(folder_.Path())));
  Request request = GreedyRequest("stored", tokens_);
  request.timeout_seconds = 0.05;
  EXPECT_EQ(RunOne(engine, request).finish, FinishReason::kTimeout);
  disk->hangs = false;
}

// Once both are measured, what is cheaper to compute is not loaded.
TEST_F(DiskTierTest, PagesOfASlowDiskAreComputed) {
  Fill();
  std::atomic<int> reads = 0;
  const store::FakeClock clock;
  EngineConfig config = StoredConfig(folder_.Path());
  config.max_num_batched_tokens = 128;
  EngineComponents components = LoadComponents(config);
  components.now = clock;
  components.before_read = [&] {
    ++reads;
    clock.Advance(1);
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

// A read that hangs for good, as on a network file system whose server is gone, is left behind.
TEST_F(DiskTierTest, AHangingReadDoesNotHoldUpTheEnd) {
  Fill();
  const auto disk = std::make_shared<HangingDisk>();
  {
    Engine::Impl engine(ComponentsOn(disk, StoredConfig(folder_.Path())));
    Request request = GreedyRequest("stored", tokens_);
    request.timeout_seconds = 0.05;
    EXPECT_EQ(RunOne(engine, request).finish, FinishReason::kTimeout);
    disk->pace = 0.1;
  }
  EXPECT_GT(disk.use_count(), 1) << "the thread is left behind";
  disk->hangs = false;
  while (disk.use_count() > 1) std::this_thread::yield();  // it ends by itself
}

TEST_F(DiskTierTest, AHangingWriteHoldsNobodyUpForLong) {
  const std::vector<float> cold = StoredLogits(*std::make_unique<Engine>(ConfigOf({"int4", false})), tokens_).logits;
  const auto disk = std::make_shared<HangingDisk>();
  double start = 0;
  {
    Engine::Impl engine(ComponentsWritingTo(disk, StoredConfig(folder_.Path())));
    EXPECT_EQ(StoredLogits(engine, tokens_).logits, cold) << "for ever, if a step waited for the disk";
    while (disk->calls == 0) std::this_thread::yield();
    start = disk->clock();
    disk->pace = 0.1;
  }
  EXPECT_GT(disk->clock() - start, 9.9) << "what is queued has its time";
  disk->hangs = false;
  while (disk.use_count() > 1) std::this_thread::yield();
  EXPECT_LE(RecordFiles(folder_.Path()).size(), 1u) << "only the write that hung went on";
}

// A disk of a second per read costs a request the least patience there is, once the cost of computing is known.
TEST_F(DiskTierTest, ReadsOfSecondsAreGivenUp) {
  Fill();
  const auto disk = std::make_shared<HangingDisk>();
  EngineConfig config = StoredConfig(folder_.Path());
  config.max_num_batched_tokens = 128;
  Engine::Impl engine(ComponentsOn(disk, config));
  RunOne(engine, GreedyRequest("measures", Tokens(5, 100), 1));
  RunningOutputs outputs;
  engine.Add(GreedyRequest("stored", tokens_, 2));
  engine.Start(outputs.Callback());
  while (disk->calls == 0) std::this_thread::yield();
  disk->clock.Advance(0.9);
  const Collected late = outputs.WaitFor("stored");
  engine.Stop();
  disk->hangs = false;
  Engine alone(ConfigOf({"int4", false}));
  EXPECT_EQ(late.tokens, RunOne(alone, GreedyRequest("alone", tokens_, 2)).tokens);
  EXPECT_GT(engine.Stats().disk.read_errors, 0);
}

// A file system of its own, which fills up and which can be made read-only even for root.
class SmallDisk : public DiskTierTest {
 protected:
  void SetUp() override {
    if (::mount("tmpfs", folder_.Path().c_str(), "tmpfs", 0, "size=32k,mode=700") != 0)
      GTEST_SKIP() << "mount needs root";
    mounted_ = true;
  }
  void TearDown() override {
    if (mounted_) ::umount2(folder_.Path().c_str(), MNT_DETACH);
  }
  bool mounted_ = false;
};

TEST_F(SmallDisk, AFullDiskCostsItsWritesAlone) {
  std::vector<std::string> warnings;
  EngineConfig config = StoredConfig(folder_.Path());
  config.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  Engine engine(config);
  Engine alone(ConfigOf({"int4", false}));
  for (uint64_t i = 0; i < 4; ++i) {
    engine.ResetPrefixCache();
    const Scored run = StoredLogits(engine, Tokens(i % 2, 100));
    EXPECT_TRUE(SameRows(ColdLogits(alone, Tokens(i % 2, 100)), run.logits, run.cached));
    engine.FlushPrefixCache();
  }
  RunOne(engine, GreedyRequest("tells", Tokens(9, 20)));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("No space left on device"), std::string::npos) << warnings[0];
  EXPECT_GT(engine.Stats().disk.write_errors, 0);
  for (const CacheFolderEntry& entry : VerifyCacheFolder(folder_.Path())) EXPECT_TRUE(entry.damaged.empty());
  for (const fs::path& path : RecordFiles(folder_.Path())) {
    EXPECT_FALSE(path.filename().string().starts_with(".tmp")) << "a part of a file stays";
  }
}

TEST_F(SmallDisk, AReadOnlyFolderIsRead) {
  tokens_.resize(40);  // two pages, which fit
  const std::vector<float> cold = Fill();
  ASSERT_EQ(::mount("tmpfs", folder_.Path().c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=32k,mode=700"), 0);
  std::vector<std::string> warnings;
  EngineConfig config = StoredConfig(folder_.Path());
  config.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  Engine engine(config);
  const Scored run = StoredLogits(engine, tokens_);
  EXPECT_EQ(run.cached, 32);
  EXPECT_TRUE(SameRows(cold, run.logits, run.cached));
  StoredLogits(engine, Tokens(2, 100));
  engine.FlushPrefixCache();
  RunOne(engine, GreedyRequest("tells", Tokens(9, 20)));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("Read-only file system"), std::string::npos) << warnings[0];
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
