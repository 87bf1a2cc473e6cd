// Precision by pressure: what runs where memory is short has the bits of a replay of its events, computed alone and
// cold; nothing is preempted while a page is above the floor.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "engine/format_cases.h"
#include "error_of.h"

namespace kvanta::engine {
namespace {

struct FloorCase {
  const char* scheme;
  enum Model { kFull, kWindow, kHybrid, kLatents } model = kFull;
};

const FloorCase kFloors[] = {{"0=int8,floor=t3"},
                             {"0=int8,floor=int4,floor=t2+sink=0"},
                             {"0=int4,floor=t3+sink=0"},
                             {"0=int4+exact=2,floor=int3_g32+sink=2"},
                             {"0=fp8_per_token_head+hadamard,floor=int4+sink=0"},
                             {"0=int8,floor=k=int4,v=t3"},
                             {"0=bf16,floor=mla_int4+sink=0", FloorCase::kLatents},
                             {"0=int8,floor=t3+sink=0", FloorCase::kWindow},
                             {"0=int4,floor=t2+sink=0", FloorCase::kHybrid},
                             {"0=int8,floor=int4+sink=0,floor=t2+sink=0", FloorCase::kHybrid}};

#ifdef KVANTA_SANITIZED
constexpr int kRounds = 2;
#else
constexpr int kRounds = 12;
#endif

EngineConfig ConfigOf(const FloorCase& what) {
  const FormatCase model{.format = what.scheme,
                         .windowed = what.model == FloorCase::kWindow,
                         .latents = what.model == FloorCase::kLatents,
                         .hybrid = what.model == FloorCase::kHybrid};
  EngineConfig config = TinyConfig(ModelOf(model), what.scheme);
  config.max_model_len = 256;
  return config;
}

// The request again, with the events of its answer.
Request Replayed(Request request, const KvCacheRecord& record) {
  request.sampling.kv_cache_events = record.events;
  return request;
}

class Floor : public testing::TestWithParam<FloorCase> {};

TEST_P(Floor, AReplayHasTheSameBits) {
  EngineConfig alone_config = ConfigOf(GetParam());
  alone_config.max_num_seqs = 1;
  Engine alone(alone_config);
  std::mt19937_64 random(1);
  int64_t demotions = 0, preemptions = 0, hits = 0, with_events = 0;
  for (int round = 0; round < kRounds; ++round) {
    EngineConfig config = ConfigOf(GetParam());
    config.threads = round % 3 + 1;
    config.max_num_batched_tokens = round % 2 == 0 ? 64 : 17 + static_cast<int>(random() % 60);
    config.enable_prefix_caching = round % 4 != 3;
    ScheduleBy(round, config);
    const CachePlan plan = PlanCacheBytes(config);
    config.kv_cache_memory_bytes =
        static_cast<int64_t>(static_cast<double>(ScarceMemory(plan)) * (round % 3 == 0 ? 1.2 : 1.6));
    Engine crowd(config);
    std::vector<std::vector<int32_t>> stems;
    for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * config.page_size));
    std::map<std::string, Request> requests;
    std::map<std::string, Collected> results;
    std::vector<RequestOutput> outputs;
    const auto add = [&] {
      Request request = RandomRequest(random, stems, static_cast<int>(requests.size()));
      request.pooling.reset();
      // Some go on after an earlier answer.
      std::vector<const Request*> ended;
      for (const auto& [id, each] : requests) {
        if (results[id].finish == FinishReason::kLength) ended.push_back(&each);
      }
      if (!ended.empty() && random() % 3 != 0) {
        const Request& before = *ended[random() % ended.size()];
        request.prompt = before.prompt;
        const std::vector<int32_t>& answer = results[before.id].tokens;
        request.prompt.insert(request.prompt.end(), answer.begin(), answer.end());
        request.prompt.push_back(static_cast<int32_t>(random() % 90));
        if (request.prompt.size() > 200) request.prompt.resize(200);
        request.cache_salt = before.cache_salt;
      }
      requests[request.id] = request;
      crowd.Add(request);
    };
    while (true) {
      while (requests.size() < 24 && random() % 3 != 0) add();
      if (!crowd.Step(outputs) && requests.size() == 24) break;
      Collect(outputs, results);
    }
    demotions += crowd.Stats().demotions;
    preemptions += crowd.Stats().preemptions;
    hits += crowd.Stats().cached_tokens;
    for (const auto& [id, request] : requests) {
      const Collected& got = results[id];
      ASSERT_EQ(got.error, "");
      ASSERT_TRUE(got.kv_cache.has_value());
      with_events += got.kv_cache->events.empty() ? 0 : 1;
      if (!got.kv_cache->is_replayable) continue;
      const Collected want = RunOne(alone, Replayed(request, *got.kv_cache));
      ExpectEqual(got, want, id);
      EXPECT_EQ(got.kv_cache->events, want.kv_cache->events);
      if (HasFailure())
        FAIL() << "round " << round << " request " << id << ", " << got.cached_tokens << " cached, " << got.preemptions
               << " preemptions, " << got.kv_cache->events.size() << " events";
    }
  }
#ifndef KVANTA_SANITIZED  // which has too few rounds to be sure of them
  EXPECT_GT(demotions, 0);
  EXPECT_GT(with_events, 0);
  EXPECT_GT(hits, 0);
  if (std::string_view(GetParam().scheme) == "0=int8,floor=t3") {
    EXPECT_GT(preemptions, 0);
  }
#else
  EXPECT_GT(demotions + preemptions + hits + with_events, 0);
#endif
}

TEST(FloorTest, NothingIsPreemptedWhileAPageIsAboveTheFloor) {
  for (const char* scheme : {"0=int8,floor=t3+sink=0", "0=bf16+hadamard,floor=int8,floor=int4+sink=0"}) {
    EngineConfig config = TinyConfig(Model(), scheme);
    config.max_model_len = 256;
    const CachePlan plan = PlanCacheBytes(config);
    config.kv_cache_memory_bytes = 6 * plan.sequence_bytes + 8 * plan.page_bytes;
    ASSERT_LT(config.kv_cache_memory_bytes, static_cast<int64_t>(5 * 256 * plan.bytes_per_token));
    Engine engine(config);
    std::mt19937_64 random(3);
    for (int i = 0; i < 6; ++i) {
      engine.Add({.id = std::to_string(i), .prompt = RandomTokens(random, 120), .sampling = Greedy(130)});
    }
    std::vector<RequestOutput> outputs;
    int64_t max_running = 0, tokens = 0;
    while (engine.Step(outputs)) {
      max_running = std::max(max_running, engine.Stats().running);
      for (const RequestOutput& output : outputs) tokens += std::ssize(output.tokens);
    }
    EXPECT_EQ(tokens, 6 * 130);
    EXPECT_EQ(max_running, 6) << "pages above the floor let nobody wait";
    EXPECT_EQ(engine.Stats().preemptions, 0);
    EXPECT_GT(engine.Stats().demotions, 6);
  }
}

// A cached prefix is demoted before any part of it is evicted, and a later hit says so.
TEST(FloorTest, PrefixesAreDemotedBeforeTheyAreEvicted) {
  EngineConfig config = TinyConfig(Model(), "0=int8,floor=t3+sink=0");
  const CachePlan plan = PlanCacheBytes(config);
  config.kv_cache_memory_bytes = 18 * plan.page_bytes;
  Engine engine(config);
  std::mt19937_64 random(4);
  const std::vector<int32_t> first = RandomTokens(random, 100);
  RunOne(engine, {.id = "first", .prompt = first, .sampling = Greedy(1)});
  for (int i = 0; i < 2; ++i) {
    RunOne(engine, {.id = "other", .prompt = RandomTokens(random, 110), .sampling = Greedy(1)});
  }
  EXPECT_EQ(engine.Stats().prefix_evictions, 0);
  EXPECT_GT(engine.Stats().demotions, 0);
  const Collected again = RunOne(engine, {.id = "again", .prompt = first, .sampling = Greedy(9)});
  EXPECT_EQ(again.cached_tokens, 96);
  ASSERT_FALSE(again.kv_cache->events.empty());
  EXPECT_EQ(again.kv_cache->events.front().position, 96);
  Request replay{.id = "replay", .prompt = first, .sampling = Greedy(9)};
  replay.sampling.kv_cache_events = again.kv_cache->events;
  const Collected replayed = RunOne(engine, replay);
  EXPECT_EQ(replayed.cached_tokens, 0);
  ExpectEqual(replayed, again, "replay");
}

// Pages that were computed after a demotion are another path in the prefix cache than those of the same tokens without.
TEST(FloorTest, AHitTakesOverTheEventsOfItsPages) {
  EngineConfig config = TinyConfig(Model(), "0=int8,floor=t3+sink=0");
  Engine engine(config), alone(config);
  std::mt19937_64 random(5);
  Request first{.id = "first", .prompt = RandomTokens(random, 90), .sampling = Greedy(20)};
  first.sampling.kv_cache_events = {{{.position = 32, .first_page = 0, .end_page = 2, .level = 1}}};
  const Collected answer = RunOne(engine, first);
  EXPECT_EQ(answer.kv_cache->events, *first.sampling.kv_cache_events);
  EXPECT_EQ(answer.kv_cache->pages, (std::vector<int64_t>{4, 2}));
  Request next{.id = "next", .prompt = first.prompt, .sampling = Greedy(5)};
  next.sampling.logprobs = 2;
  next.prompt.insert(next.prompt.end(), answer.tokens.begin(), answer.tokens.end());
  const Collected hit = RunOne(engine, next);
  EXPECT_EQ(hit.cached_tokens, 96);
  EXPECT_EQ(hit.kv_cache->events, answer.kv_cache->events);
  ExpectEqual(hit, RunOne(alone, Replayed(next, *hit.kv_cache)), "with the events");

  Request undemoted = next;
  undemoted.sampling.kv_cache_events.emplace();
  const Collected clean = RunOne(engine, undemoted);
  EXPECT_EQ(clean.cached_tokens, 0);
  EXPECT_FALSE(Same(clean.logprobs, hit.logprobs));
  const Collected clean_hit = RunOne(engine, next);
  EXPECT_EQ(clean_hit.cached_tokens, 96);
  EXPECT_TRUE(clean_hit.kv_cache->events.empty()) << "pages without events are found first";
  ExpectEqual(clean_hit, clean, "without events");
}

TEST(FloorTest, RefusesEventsThatCannotBe) {
  Engine engine(TinyConfig(Model(), "0=int8,floor=t3")), plain(TinyConfig(Model(), "int8"));
  const auto error_of = [](Engine& of, KvCacheEvent event) {
    Request request{.id = "x", .prompt = {1, 2, 3}, .sampling = Greedy(1)};
    request.sampling.kv_cache_events = {{event}};
    return ErrorOf([&] { of.Add(request); });
  };
  EXPECT_THAT(error_of(plain, {32, 0, 1, 1}), testing::HasSubstr("no kv_cache_floor"));
  EXPECT_THAT(error_of(engine, {32, 0, 1, 2}), testing::HasSubstr("levels are from 1 to 1"));
  EXPECT_THAT(error_of(engine, {32, 0, 3, 1}), testing::HasSubstr("2 pages are before this position"));
  EXPECT_THAT(error_of(engine, {32, 1, 1, 1}), testing::HasSubstr("less than its end"));
}

INSTANTIATE_TEST_SUITE_P(Schemes, Floor, testing::ValuesIn(kFloors), [](const auto& tested) {
  return NameOf({FormatCase{.format = tested.param.scheme,
                            .windowed = tested.param.model == FloorCase::kWindow,
                            .latents = tested.param.model == FloorCase::kLatents,
                            .hybrid = tested.param.model == FloorCase::kHybrid},
                 tested.index});
});

}  // namespace
}  // namespace kvanta::engine
