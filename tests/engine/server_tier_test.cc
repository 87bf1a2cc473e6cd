// The prefix cache in a server that machines share: a hit gives the bits of a cold run, and whatever the server does,
// requests are answered.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/clock.h"
#include "engine/hanging_disk.h"
#include "engine/stored_prefixes.h"
#include "store/fake_redis.h"

namespace kvanta::engine {
namespace {

using store::FakeRedis;
using Values = std::map<std::string, std::string>;

EngineConfig ServedConfig(const FormatCase& what, const std::string& url) {
  EngineConfig config = ConfigOf(what);
  config.kv_store = url;
  return config;
}

class ServerTierFormats : public testing::TestWithParam<FormatCase> {};

// Two machines, of which the second has a disk: what either computed, the other reads.
TEST_P(ServerTierFormats, AHitOfAnotherMachinesPagesHasTheBitsOfAColdRun) {
  FakeRedis redis;
  const weights::TempFolder folder;
  EngineConfig cold_config = ConfigOf(GetParam());
  cold_config.enable_prefix_caching = false;
  Engine cold(cold_config);
  EngineConfig with_disk = ServedConfig(GetParam(), redis.Url());
  with_disk.kv_cache_dir = folder.Path();
  std::mt19937_64 random(700);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 96));
  int hits = 0;
  EngineOnFakeClock first(ServedConfig(GetParam(), redis.Url()));
  EngineOnFakeClock second(with_disk);
  for (int i = 0; i < 12; ++i) {
    std::vector<int32_t> tokens = stems[random() % stems.size()];
    tokens.resize(random() % 64 + 33);
    const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 20));
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    EngineOnFakeClock& engine = i % 2 == 0 ? first : second;
    const Scored run = StoredLogits(engine, tokens, static_cast<int>(random() % 64 + 1));
    ASSERT_TRUE(SameRows(ColdLogits(cold, tokens), run.logits, run.cached))
        << "case " << i << ": " << run.cached << " of " << tokens.size() << " cached";
    hits += run.cached > 0 ? 1 : 0;
    engine.FlushPrefixCache();
    engine.ResetPrefixCache();
  }
  EXPECT_GT(hits, 6);
  EXPECT_GT(first.Stats().store.hit_tokens, 0);
  EXPECT_GT(second.Stats().store.hit_tokens, 0);
  for (const EngineOnFakeClock* engine : {&first, &second}) {
    EXPECT_EQ(engine->Stats().store.damaged_files, 0);
    EXPECT_EQ(engine->Stats().store.read_errors, 0);
  }
}

// Every kind of record; the other formats differ in their bytes alone, and disk_tier_test.cc has them all.
INSTANTIATE_TEST_SUITE_P(Formats, ServerTierFormats,
                         testing::Values(FormatCase{"bf16", true}, FormatCase{"int4", false},
                                         FormatCase{"int5_g32+exact=2+sink=2", true},
                                         FormatCase{"kivi4+exact=2", false}, FormatCase{"int4", true, false, true},
                                         FormatCase{"mla_fp8", false, true}),
                         NameOf);

class ServerTierTest : public DiskTierTest {
 protected:
  EngineConfig Config() {
    EngineConfig config = ServedConfig({"int4", false}, redis_.Url());
    config.on_warning = [this](const std::string& text) { warnings_.push_back(text); };
    return config;
  }

  std::vector<float> FillServer() { return Fill(Config()); }

  FakeRedis redis_;
  std::vector<std::string> warnings_;
};

TEST_F(ServerTierTest, MemoryThenDiskThenServer) {
  const std::vector<float> cold = FillServer();
  EngineConfig config = Config();
  config.kv_cache_dir = folder_.Path();
  {
    EngineOnFakeClock engine(config);
    EXPECT_EQ(RunOne(engine, GreedyRequest("r", tokens_)).cached_tokens, 96);
    EXPECT_EQ(engine.Stats().store.hit_tokens, 96);
    EXPECT_EQ(engine.Stats().disk.hit_tokens, 0);
    EXPECT_EQ(RunOne(engine, GreedyRequest("again", tokens_)).cached_tokens, 96) << "from memory";
    EXPECT_EQ(engine.Stats().store.lookup_tokens, 96);
  }
  EXPECT_GE(RecordFiles(folder_.Path()).size(), 6u) << "pages of the server are written to the folder";
  redis_.Stop();
  Engine engine(config);
  const Scored run = StoredLogits(engine, tokens_);
  EXPECT_EQ(run.cached, 96);
  EXPECT_TRUE(SameRows(cold, run.logits, run.cached));
  EXPECT_EQ(engine.Stats().disk.hit_tokens, 96);
  EXPECT_EQ(engine.Stats().store.hit_tokens, 0);
}

// The first pages on disk, the rest in the server.
TEST_F(ServerTierTest, APrefixMayLieInTwoPlaces) {
  const std::vector<float> cold = FillServer();
  EngineConfig config = Config();
  config.kv_cache_dir = folder_.Path();
  {
    EngineConfig disk_alone = config;
    disk_alone.kv_store.clear();
    Fill(disk_alone);
  }
  auto values = redis_.Values();
  const std::vector<fs::path> files = RecordFiles(folder_.Path());
  for (size_t i = 0; i < files.size(); ++i) {
    if (i % 2 == 0) {
      fs::remove(files[i]);
    } else {
      std::erase_if(values,
                    [&](const auto& value) { return value.first.find(files[i].filename()) != std::string::npos; });
    }
  }
  redis_.SetValues(values);
  EngineOnFakeClock engine(config);
  const Scored run = StoredLogits(engine, tokens_);
  EXPECT_EQ(run.cached, 96);
  EXPECT_TRUE(SameRows(cold, run.logits, run.cached));
  EXPECT_EQ(engine.Stats().disk.hit_tokens + engine.Stats().store.hit_tokens, 96);
  EXPECT_GT(engine.Stats().disk.hit_tokens, 0);
  EXPECT_GT(engine.Stats().store.hit_tokens, 0);
}

// Values that are not whole, and others', are replaced; no bit differs.
TEST_F(ServerTierTest, DamagedValuesAreNeverUsed) {
  const std::vector<float> cold = FillServer();
  const Values whole = redis_.Values();
  ASSERT_EQ(whole.size(), 6u);
  std::mt19937_64 random(8);
  for (int i = 0; i < kDamages; ++i) {
    Values values = whole;
    const auto victim = std::next(values.begin(), static_cast<std::ptrdiff_t>(random() % values.size()));
    std::string& bytes = victim->second;
    switch (i % 5) {
      case 0:
        bytes[random() % bytes.size()] ^= static_cast<char>(1U << (random() % 8));
        break;
      case 1:
        bytes.resize(random() % (bytes.size() - 1) + 1);
        break;
      case 2:
        bytes[8] = 2;  // another version
        break;
      case 3:  // another page's
        bytes = std::next(victim) == values.end() ? values.begin()->second : std::next(victim)->second;
        break;
      case 4:
        bytes.assign(bytes.size(), '\0');
        break;
    }
    if (bytes == whole.at(victim->first)) continue;
    redis_.SetValues(values);
    EngineOnFakeClock engine(Config());
    const Scored run = StoredLogits(engine, tokens_);
    EXPECT_TRUE(SameRows(cold, run.logits, run.cached)) << "damage " << i;
    EXPECT_LT(run.cached, 96) << "damage " << i;
    EXPECT_EQ(engine.Stats().store.damaged_files, 1) << "damage " << i;
    engine.FlushPrefixCache();
    EXPECT_EQ(redis_.Values(), whole) << "written again";
  }
}

TEST_F(ServerTierTest, AServerThatRefusesIsToldOncePerSide) {
  redis_.Stop();
  EngineOnFakeClock engine(Config());
  const double start = Now();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(RunOne(engine, GreedyRequest("r", Tokens(static_cast<uint64_t>(i), 100), 1)).error, "");
    engine.FlushPrefixCache();
  }
  EXPECT_LT(Now() - start, 60) << "a wait for an answer";
  RunOne(engine, GreedyRequest("last", Tokens(9, 20), 1));
  ASSERT_EQ(warnings_.size(), 2u) << "reading and writing";
  for (const std::string& text : warnings_) {
    EXPECT_NE(text.find("Connection refused"), std::string::npos) << text;
    EXPECT_EQ(text.find("kv_store = 'redis://127.0.0.1:"), 0u) << text;
  }
  EXPECT_GT(engine.Stats().store.read_errors, 0);
  EXPECT_GT(engine.Stats().store.write_errors, 0);
}

TEST_F(ServerTierTest, ARestartedServerIsFilledAgain) {
  const store::FakeClock clock;
  EngineOnFakeClock engine(Config(), clock);
  StoredLogits(engine, tokens_);
  engine.FlushPrefixCache();
  EXPECT_EQ(redis_.Values().size(), 6u);
  redis_.Stop();
  RunOne(engine, GreedyRequest("new", Tokens(2, 100), 1));
  engine.FlushPrefixCache();
  redis_.Restart();
  clock.Advance(1.1);                                         // the first pause
  RunOne(engine, GreedyRequest("other", Tokens(3, 100), 1));  // connects, so that what was known is forgotten
  engine.FlushPrefixCache();
  RunOne(engine, GreedyRequest("again", tokens_, 1));  // a hit in memory: written after all
  engine.FlushPrefixCache();
  EXPECT_EQ(redis_.Values().size(), 12u);
}

// A server that answers lookups, and nothing else: the request is computed within the patience of a load.
TEST_F(ServerTierTest, AStallingServerHoldsNobodyUpForLong) {
  FillServer();
  redis_.SetAnswer(
      [](const FakeRedis::Words& words) { return words[0] == "MGET" ? std::optional<std::string>("") : std::nullopt; });
  EngineComponents components = LoadComponents(Config());
  components.answer_seconds = 0.2;
  Engine::Impl engine(std::move(components));
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
  EXPECT_GT(ended["stored"], 0.2);
  EXPECT_LT(ended["stored"], 1.9) << "the server's patience, not the engine's";
  EXPECT_GT(engine.Stats().store.read_errors, 0);
  Engine alone(ConfigOf({"int4", false}));
  EXPECT_EQ(results["stored"].tokens, RunOne(alone, GreedyRequest("alone", tokens_, 2)).tokens);
}

TEST_F(ServerTierTest, AbortEndsARequestThatLoads) {
  FillServer();
  redis_.SetAnswer(
      [](const FakeRedis::Words& words) { return words[0] == "MGET" ? std::optional<std::string>("") : std::nullopt; });
  EngineOnFakeClock engine(Config());
  std::atomic<int> aborted = 0;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) aborted += output.finish == FinishReason::kAbort ? 1 : 0;
  });
  engine.Add(GreedyRequest("stored", tokens_));
  while (engine.Stats().loading == 0) std::this_thread::yield();
  engine.Abort("stored", "");
  while (aborted == 0) std::this_thread::yield();
  EXPECT_EQ(engine.Stats().store.read_errors, 0) << "the server could still answer";
  EXPECT_EQ(engine.Stats().loading, 0);
  engine.Stop();
}

// A slow server's pages are computed once both are measured, those of the disk are read all the same.
TEST_F(ServerTierTest, RatesAreMeasuredPerTier) {
  FillServer();
  EngineConfig config = Config();
  config.kv_cache_dir = folder_.Path();
  config.max_num_batched_tokens = 128;
  const store::FakeClock clock;
  redis_.SetAnswer([&](const FakeRedis::Words& words) {
    if (words[0] == "MGET") clock.Advance(0.5);
    return std::optional<std::string>();
  });
  EngineOnFakeClock engine(config, clock);
  EXPECT_EQ(RunOne(engine, GreedyRequest("first", tokens_, 1)).cached_tokens, 96);  // nothing is measured yet
  RunOne(engine, GreedyRequest("measures", Tokens(5, 100), 1));
  engine.FlushPrefixCache();
  engine.ResetPrefixCache();
  EXPECT_EQ(RunOne(engine, GreedyRequest("disk", tokens_, 1)).cached_tokens, 96);
  EXPECT_GT(engine.Stats().disk.hit_tokens, 0);
  const int64_t read = engine.Stats().store.hit_tokens;
  engine.ResetPrefixCache();
  for (const fs::path& file : RecordFiles(folder_.Path())) fs::remove(file);
  RunOne(engine, GreedyRequest("tries again", tokens_, 1));
  engine.FlushPrefixCache();
  engine.ResetPrefixCache();
  for (const fs::path& file : RecordFiles(folder_.Path())) fs::remove(file);
  EXPECT_EQ(RunOne(engine, GreedyRequest("computes", tokens_, 1)).cached_tokens, 0);
  EXPECT_GT(engine.Stats().store.declined_tokens, 0);
  EXPECT_LE(engine.Stats().store.hit_tokens, read + 96);
}

TEST_F(ServerTierTest, PasswordsAreNoOnesBusiness) {
  redis_.SetAnswer([](const FakeRedis::Words& words) {
    return words[0] == "AUTH" ? std::optional<std::string>("-WRONGPASS secret\r\n") : std::nullopt;
  });
  EngineConfig config = Config();
  config.kv_store = fmt::format("redis://me:secret@127.0.0.1:{}", redis_.Port());
  Engine engine(config);
  EXPECT_EQ(engine.Config().kv_store, fmt::format("redis://***@127.0.0.1:{}", redis_.Port()));
  RunOne(engine, GreedyRequest("r", tokens_, 1));
  engine.FlushPrefixCache();
  RunOne(engine, GreedyRequest("last", Tokens(9, 20), 1));
  ASSERT_FALSE(warnings_.empty());
  for (const std::string& text : warnings_) {
    EXPECT_EQ(text.find("secret"), text.npos) << text;
    EXPECT_NE(text.find("WRONGPASS"), text.npos) << text;
  }
}

TEST_F(ServerTierTest, UrlsThatAreNoneAreInputErrors) {
  EngineConfig config = Config();
  config.kv_store = "http://host";
  EXPECT_THROW(Engine{config}, InputError);
  config.kv_store = "redis://host:none";
  EXPECT_THROW(Engine{config}, InputError);
  config = Config();
  config.enable_prefix_caching = false;
  EXPECT_THROW(Engine{config}, InputError);
}

}  // namespace
}  // namespace kvanta::engine
