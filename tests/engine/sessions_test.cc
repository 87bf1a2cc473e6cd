// Conversations: every turn hits its own history in the prefix cache and gets the bits of a cold run, for every format,
// while other conversations run in a cache that is too small for all.
#include <gtest/gtest.h>

#include <cstring>

#include "engine/requests.h"
#include "formats/format.h"

namespace kvanta::engine {
namespace {

void ExpectSame(const Collected& got, const Collected& want, const std::string& where) {
  ASSERT_EQ(got.error, "") << where;
  ASSERT_EQ(got.tokens, want.tokens) << where;
  ASSERT_EQ(got.logprobs.size(), want.logprobs.size()) << where;
  for (size_t i = 0; i < got.logprobs.size(); ++i) {  // sums over all logits: one other bit shows
    ASSERT_EQ(std::memcmp(&got.logprobs[i][0].logprob, &want.logprobs[i][0].logprob, sizeof(float)), 0) << where;
  }
}

// Sanitizers look for faults of memory and threads, which formats share.
bool IsTested([[maybe_unused]] const formats::Format& format) {
#ifdef KVANTA_SANITIZED
  return format.name == "bf16" || format.name == "int4" || format.name == "kivi4" || format.name == "mla_int4";
#else
  return true;
#endif
}

TEST(Sessions, PrefixHitsGiveTheBitsOfAColdRunForEveryFormat) {
  constexpr int kSessions = 4, kTurns = 5;
  for (const formats::Format& format : formats::All()) {
    if (!IsTested(format)) continue;
    if (formats::IsAllocated(format.code)) continue;  // needs a calibrated model: tests/python/test_query_keys.py
    EngineConfig config = TinyConfig(ModelFor(std::string(format.name)), std::string(format.name));
    config.page_size = std::max(config.page_size, format.scaling.token_group);
    config.max_model_len = 256;
    EngineConfig cold_config = config;
    cold_config.enable_prefix_caching = false;
    Engine cold(cold_config);
    const CachePlan plan = PlanCacheBytes(config);
    const int64_t pages = 2 * 256 / config.page_size;  // fewer than the up to 600 tokens take in the end
    config.kv_cache_memory_bytes = pages * (plan.page_bytes + plan.exact_page_bytes / 3);
    Engine engine(config);
    std::mt19937_64 random(77);
    std::vector<std::vector<int32_t>> histories;
    for (int i = 0; i < kSessions; ++i) histories.push_back(RandomTokens(random, 30 + 10 * i));
    histories.back() = histories.front();  // the same words, but another tenant's
    int64_t own = 0;
    for (int turn = 0; turn < kTurns; ++turn) {
      std::vector<Request> requests;
      for (int i = 0; i < kSessions; ++i) {
        Request request{.id = std::to_string(i), .prompt = histories[static_cast<size_t>(i)], .sampling = Greedy(6)};
        request.cache_salt = i == kSessions - 1 ? "another tenant" : "";
        request.sampling.logprobs = 0;
        request.sampling.temperature = i == 1 ? 0.8F : 0.0F;
        requests.push_back(request);
        engine.Add(request);
      }
      const auto results = RunAll(engine);
      for (int i = 0; i < kSessions; ++i) {
        const std::string where =
            std::string(format.name) + ", turn " + std::to_string(turn) + " of " + requests[static_cast<size_t>(i)].id;
        const Collected& got = results.at(requests[static_cast<size_t>(i)].id);
        ExpectSame(got, RunOne(cold, requests[static_cast<size_t>(i)]), where);
        if (HasFatalFailure()) return;
        if (turn == 0) {
          EXPECT_EQ(got.cached_tokens, 0) << where;
        }
        own += got.cached_tokens;
        auto& history = histories[static_cast<size_t>(i)];
        history.insert(history.end(), got.tokens.begin(), got.tokens.end());
        const auto more = RandomTokens(random, 10 + i);
        history.insert(history.end(), more.begin(), more.end());
      }
    }
    EXPECT_GT(own, kSessions * 60) << format.name << ": the turns should have found their histories";
    engine.ResetPrefixCache();
    EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << format.name;
  }
}

}  // namespace
}  // namespace kvanta::engine
