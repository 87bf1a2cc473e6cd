// Batch-invariant numerics: a token's logits have the same bits for any chunks, batch, threads, prefix hits and
// preemptions. Cases are seeded; unused cache memory holds NaN.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "engine/format_cases.h"

namespace kvanta::engine {
namespace {

#ifdef KVANTA_SANITIZED
constexpr int kShare = 10;  // many times slower, and after other faults
#else
constexpr int kShare = 1;
#endif
constexpr int kChunkCases = 500 / kShare;    // per format
constexpr int kPrefixCases = 200 / kShare;   // per format
constexpr int kRequestCases = 320 / kShare;  // per format, over all batches

class BitEquality : public testing::TestWithParam<FormatCase> {
 protected:
  EngineConfig Config() const { return ConfigOf(GetParam()); }
  // Compares bits, so that a NaN would not pass for equal to anything.
  static void ExpectSame(const std::vector<float>& a, const std::vector<float>& b, size_t from, size_t rows) {
    const size_t vocab = a.size() / rows;
    for (size_t row = from; row < rows; ++row) {
      ASSERT_EQ(std::memcmp(a.data() + row * vocab, b.data() + row * vocab, vocab * sizeof(float)), 0)
          << "row " << row << " of " << rows;
      ASSERT_EQ(a[row * vocab], a[row * vocab]) << "NaN";
    }
  }
};

TEST_P(BitEquality, HoldsForAnyChunking) {
  Engine engine(Config());
  EngineConfig threaded = Config();
  threaded.threads = 3;
  Engine other(threaded);
  std::mt19937_64 random(100);
  for (int done = 0; done < kChunkCases;) {
    const auto tokens = RandomTokens(random, static_cast<int64_t>(random() % 100 + 1));
    const auto whole = ColdLogits(engine, tokens);
    for (int i = 0; i < 10; ++i, ++done) {
      const int chunk = i == 0 ? 1 : static_cast<int>(random() % 64 + 1);
      const auto chunked = ColdLogits(i % 4 == 1 ? other : engine, tokens, chunk);
      ExpectSame(whole, chunked, 0, tokens.size());
      if (HasFatalFailure()) FAIL() << "chunks of " << chunk << (i % 4 == 1 ? ", 3 threads" : "");
    }
  }
}

TEST_P(BitEquality, HoldsForPrefixHits) {
  EngineConfig config = Config();
  Engine engine(config);
  config.enable_prefix_caching = false;
  Engine cold(config);
  std::mt19937_64 random(200);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 6; ++i) stems.push_back(RandomTokens(random, 96));
  int hits = 0;
  for (int i = 0; i < kPrefixCases; ++i) {
    std::vector<int32_t> tokens = stems[random() % stems.size()];
    tokens.resize(random() % 96 + 1);
    const auto tail = RandomTokens(random, static_cast<int64_t>(random() % 30));
    tokens.insert(tokens.end(), tail.begin(), tail.end());
    if (tokens.size() > 128) tokens.resize(128);
    std::vector<float> warm(tokens.size() * 96);
    const auto cached = engine.Logits(tokens, static_cast<int>(random() % 64 + 1), warm, true);
    EXPECT_EQ(cached % 16, 0);
    hits += cached > 0 ? 1 : 0;
    ExpectSame(ColdLogits(cold, tokens), warm, static_cast<size_t>(cached), tokens.size());
    if (HasFatalFailure()) FAIL() << "case " << i << ", " << cached << " of " << tokens.size() << " tokens cached";
    if (i % 50 == 49) engine.ResetPrefixCache();
  }
  EXPECT_GT(hits, kPrefixCases / 3);
}

// Each request alone in an engine without a prefix cache, against the same among others in a cache too small for them,
// in schedules that mostly follow the clock: tokens and log-probabilities (sums over all logits) have the same bits.
TEST_P(BitEquality, HoldsForAnyBatchAndPreemption) {
  EngineConfig alone_config = Config();
  alone_config.enable_prefix_caching = false;
  alone_config.max_num_seqs = 1;
  Engine alone(alone_config);
  std::mt19937_64 random(300);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * alone_config.page_size));
  int number = 0;
  int64_t preemptions = 0;
  int64_t hits = 0;
  for (int round = 0; number < kRequestCases; ++round) {
    EngineConfig config = Config();
    config.threads = round % 3 + 1;
    config.max_num_batched_tokens = round % 2 == 0 ? 64 : config.page_size + 1 + static_cast<int>(random() % 60);
    config.enable_prefix_caching = round % 4 != 3;
    ScheduleBy(round, config);
    const CachePlan plan = PlanCacheBytes(config);
    config.kv_cache_memory_bytes = ScarceMemory(plan);
    Engine crowd(config);
    std::vector<Request> requests;
    std::map<std::string, Collected> results;
    std::vector<RequestOutput> outputs;
    for (int i = 0; i < 20; ++i) requests.push_back(RandomRequest(random, stems, number++));
    size_t added = 0;
    while (true) {
      while (added < requests.size() && random() % 3 != 0) crowd.Add(requests[added++]);
      if (!crowd.Step(outputs) && added == requests.size()) break;
      Collect(outputs, results);
    }
    preemptions += crowd.Stats().preemptions;
    hits += crowd.Stats().cached_tokens;
    for (const Request& request : requests) {
      const Collected& got = results[request.id];
      const Collected want = RunOne(alone, request);
      ASSERT_EQ(got.error, "");
      ASSERT_EQ(got.tokens, want.tokens) << "request " << request.id;
      ASSERT_EQ(got.finish, want.finish);
      ASSERT_TRUE(Same(got.logprobs, want.logprobs)) << "request " << request.id;
      ASSERT_TRUE(Same(got.prompt_logprobs, want.prompt_logprobs)) << "request " << request.id;
    }
    crowd.ResetPrefixCache();
    EXPECT_EQ(crowd.Stats().cache_used_bytes, 0) << "references leaked";
  }
  if (kShare > 1) return;                             // how often either happens in few rounds is chance
  EXPECT_GT(preemptions, GetParam().hybrid ? 0 : 3);  // windows leave more room
  EXPECT_GT(hits, 50);
}

// A test that could not see a difference would be worthless: other formats and other tokens must give other bits.
TEST_P(BitEquality, IsNotVacuous) {
  Engine engine(Config());
  std::mt19937_64 random(400);
  auto tokens = RandomTokens(random, 60);
  const auto before = ColdLogits(engine, tokens);
  tokens[0] = (tokens[0] + 1) % 96;
  const auto after = ColdLogits(engine, tokens);
  // Two layers of windows of 40 reach back 78 tokens.
  EXPECT_NE(std::memcmp(before.data() + 59 * 96, after.data() + 59 * 96, 96 * sizeof(float)), 0);
  if (std::string(GetParam().format) != "fp32") {
    EngineConfig exact = Config();
    exact.kv_cache_dtype = "fp32";
    Engine reference(exact);
    EXPECT_NE(ColdLogits(reference, tokens), after);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, BitEquality, testing::ValuesIn(kCases), NameOf);

}  // namespace
}  // namespace kvanta::engine
