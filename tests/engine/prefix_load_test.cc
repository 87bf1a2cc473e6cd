// Loads of stored prefixes while the memory holds few of them: what is read is used, and reserved memory comes back.
#include <gtest/gtest.h>

#include <thread>

#include "engine/hanging_disk.h"
#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

constexpr int kUsers = 12;
constexpr int64_t kPrompt = 100;  // tokens: 6 pages of 16 are stored
constexpr int64_t kStored = 96;

class PrefixLoadTest : public DiskTierTest {
 protected:
  // Memory for `prompts` prompts with a few tokens after each.
  EngineConfig Config(int prompts) const {
    EngineConfig config = StoredConfig(folder_.Path());
    const CachePlan plan = PlanCacheBytes(config);
    config.kv_cache_memory_bytes =
        prompts * (8 * plan.page_bytes + plan.exact_pages_per_sequence * plan.exact_page_bytes);
    config.max_num_batched_tokens = 2 * config.page_size - 1;  // too few to measure: all that is found is loaded
    return config;
  }
  static Request UserRequest(int user) {
    return GreedyRequest(std::to_string(user), Tokens(50 + static_cast<uint64_t>(user), kPrompt), 4);
  }
  void StoreUsers() {
    Engine engine(StoredConfig(folder_.Path()));
    for (int user = 0; user < kUsers; ++user) RunOne(engine, UserRequest(user));
  }
  // Begins the load of user 0 on a disk that hangs, in a memory that it has to itself. Requests that were added before
  // have been looked up then.
  void BeginHangingLoad(Engine::Impl& engine) {
    engine.Start(outputs_.Callback());
    while (disk_->calls == 0) std::this_thread::yield();
  }

  const std::shared_ptr<HangingDisk> disk_ = std::make_shared<HangingDisk>();
  RunningOutputs outputs_;
};

TEST_F(PrefixLoadTest, WhatIsReadIsUsed) {
  StoreUsers();
  for (const int fitting : {1, 2, 3, 5}) {
    disk_->hangs = false;  // a clock that stands still gives nothing up
    Engine::Impl engine(ComponentsOn(disk_, Config(fitting)));
    for (int user = 0; user < kUsers; ++user) engine.Add(UserRequest(user));
    const auto results = RunAll(engine);
    for (const auto& [id, result] : results) {
      EXPECT_EQ(result.error, "");
      EXPECT_EQ(result.cached_tokens, kStored) << "user " << id << ", memory for " << fitting;
    }
    const EngineStats stats = engine.Stats();
    EXPECT_EQ(stats.disk.hit_tokens, kUsers * kStored) << "none was read twice, memory for " << fitting;
    EXPECT_EQ(stats.preemptions, 0);
    EXPECT_EQ(stats.loads_timed_out + stats.loads_out_of_memory, 0);
    engine.ResetPrefixCache();
    EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << "references leaked";
  }
}

// Requests in memory for one, of which one loads from a disk that hangs: the others wait for its end, not for ever.
TEST_F(PrefixLoadTest, AHangingLoadGivesItsMemoryBack) {
  StoreUsers();
  disk_->pace = 0.1;
  Engine::Impl engine(ComponentsOn(disk_, Config(1)));
  for (const int user : {0, 1}) engine.Add(UserRequest(user));
  engine.Add(GreedyRequest("new", Tokens(3, kPrompt), 4));
  const auto results = RunAll(engine);
  ASSERT_EQ(results.size(), 3u);
  for (const auto& [id, result] : results) EXPECT_EQ(result.finish, FinishReason::kLength) << id << result.error;
  EXPECT_EQ(engine.Stats().loads_timed_out, 2) << "one after the other";
  EXPECT_EQ(engine.Stats().loads_out_of_memory, 0);
  disk_->hangs = false;
}

TEST_F(PrefixLoadTest, AFailingLoadGivesItsMemoryBack) {
  StoreUsers();
  Engine engine(Config(1));
  for (int user = 0; user < kUsers; ++user) engine.Add(UserRequest(user));
  for (const fs::path& file : RecordFiles(folder_.Path())) std::ofstream(file, std::ios::trunc) << "torn";
  for (const auto& [id, result] : RunAll(engine)) {
    EXPECT_EQ(result.finish, FinishReason::kLength) << id << result.error;
    EXPECT_EQ(result.cached_tokens, 0) << id;
  }
  engine.ResetPrefixCache();
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
}

TEST_F(PrefixLoadTest, AbortFreesTheMemoryOfALoad) {
  StoreUsers();
  Engine::Impl engine(ComponentsOn(disk_, Config(1)));
  engine.Add(UserRequest(0));
  BeginHangingLoad(engine);
  engine.Add(GreedyRequest("new", Tokens(3, kPrompt), 4));
  engine.Abort("0", "");
  EXPECT_EQ(outputs_.WaitFor("0").finish, FinishReason::kAbort);
  EXPECT_FALSE(outputs_.HasEnded("new")) << "its lookup waits for the disk";
  disk_->clock.Advance(2.1);
  EXPECT_EQ(outputs_.WaitFor("new").finish, FinishReason::kLength);
  disk_->hangs = false;
  engine.Stop();
  engine.ResetPrefixCache();
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
}

// A request that comes first takes the memory of one that loads, which runs after it.
TEST_F(PrefixLoadTest, PriorityOrderIsKept) {
  StoreUsers();
  Engine::Impl engine(ComponentsOn(disk_, Config(1)));
  engine.Add(UserRequest(0));
  BeginHangingLoad(engine);
  Request urgent = GreedyRequest("urgent", Tokens(3, kPrompt), 4);
  urgent.priority = -1;
  urgent.sampling.skip_reading_prefix_cache = true;  // a lookup would hang, too
  engine.Add(std::move(urgent));
  outputs_.WaitFor("urgent");  // for ever, if it waited for the load
  EXPECT_FALSE(outputs_.HasEnded("0"));
  disk_->hangs = false;
  outputs_.WaitFor("0");
  engine.Stop();
}

// One that comes first while nobody has memory, and whose lookup has not ended: what was found after it waits for the
// memory that it will take.
TEST_F(PrefixLoadTest, AFoundPrefixWaitsForRequestsBeforeIt) {
  StoreUsers();
  Engine::Impl engine(ComponentsOn(disk_, Config(1)));
  for (const int user : {0, 1}) engine.Add(UserRequest(user));
  BeginHangingLoad(engine);
  Request urgent = UserRequest(2);
  urgent.priority = -1;
  engine.Add(std::move(urgent));
  engine.Abort("0", "");
  outputs_.WaitFor("0");
  disk_->hangs = false;
  EXPECT_EQ(outputs_.WaitFor("2").cached_tokens, kStored);
  EXPECT_EQ(outputs_.WaitFor("1").cached_tokens, kStored);
  engine.Stop();
}

// A load after one that takes long waits for its turn, on a disk that reads page by page.
TEST_F(PrefixLoadTest, ALoadBehindASlowOneIsNotStalled) {
  StoreUsers();
  disk_->hangs = false;
  std::atomic<int> reads = 0, rounds = 0;  // looks of this thread at the clock, each time that it looks at loads
  EngineComponents components = ComponentsOn(disk_, Config(2));
  components.now = [&, clock = disk_->clock, own = std::this_thread::get_id()] {
    rounds += std::this_thread::get_id() == own ? 1 : 0;
    return clock();
  };
  components.before_read = [&] {
    disk_->clock.Advance(0.6);
    // This thread sees every read by itself, however the machine is loaded: two would be longer than a stall.
    const int looks = ++reads == 5 ? 4 : 1;
    for (const int before = rounds; rounds < before + looks;) std::this_thread::yield();
  };
  Engine::Impl engine(std::move(components));
  for (const int user : {0, 1}) engine.Add(UserRequest(user));
  for (const auto& [id, result] : RunAll(engine)) EXPECT_EQ(result.cached_tokens, kStored) << id;
  EXPECT_EQ(engine.Stats().disk.read_errors, 0);
}

// Aborts and priorities at random, in memory for two: everybody ends, and no reference is left.
TEST_F(PrefixLoadTest, EverybodyEndsUnderRandomTraffic) {
  StoreUsers();
  int64_t hits = 0;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    std::mt19937_64 random(seed);
    disk_->hangs = false;
    Engine::Impl engine(ComponentsOn(disk_, Config(static_cast<int>(random() % 3) + 1)));
    std::map<std::string, Collected> results;
    std::vector<RequestOutput> outputs;
    int added = 0;
    for (bool has_work = true; has_work || added < 40;) {
      while (added < 40 && random() % 3 != 0) {
        Request request = UserRequest(static_cast<int>(random() % kUsers));
        request.id = std::to_string(added++);
        request.priority = static_cast<int>(random() % 3);
        request.sampling.max_tokens = static_cast<int>(random() % 20) + 1;
        engine.Add(std::move(request));
      }
      if (random() % 4 == 0) engine.Abort(std::to_string(random() % 40), "");
      has_work = engine.Step(outputs);
      Collect(outputs, results);
    }
    ASSERT_EQ(results.size(), 40u) << "seed " << seed;
    for (const auto& [id, result] : results) {
      EXPECT_TRUE(result.finish == FinishReason::kLength || result.finish == FinishReason::kAbort) << result.error;
    }
    hits += engine.Stats().disk.hit_tokens;
    EXPECT_EQ(engine.Stats().loading, 0);
    engine.ResetPrefixCache();
    EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << "seed " << seed;
  }
  EXPECT_GT(hits, 0);
}

}  // namespace
}  // namespace kvanta::engine
