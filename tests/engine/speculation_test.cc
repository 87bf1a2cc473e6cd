// Speculative decoding: tokens and log-probabilities have the same bits with and without it, for every format, and for
// drafts of any quality.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "engine/engine_impl.h"
#include "engine/format_cases.h"
#include "engine/scripted_proposer.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

class SpeculationOver : public testing::TestWithParam<FormatCase> {};

// Random requests, sampled and greedy, with penalties and stop tokens, in a cache too small for them.
TEST_P(SpeculationOver, KeepsEveryBit) {
  EngineConfig plain_config = ConfigOf(GetParam());
  plain_config.enable_prefix_caching = false;
  plain_config.max_num_seqs = 1;
  Engine plain(plain_config);
  std::mt19937_64 random(502);
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * plain_config.page_size));
  int number = 0;
  int64_t preemptions = 0;
  int64_t hits = 0;
  for (const double error_rate : {0.0, 0.2, 0.5}) {
    EngineConfig config = ConfigOf(GetParam());
    config.threads = number == 0 ? 1 : 2;
    config.kv_cache_memory_bytes = ScarceMemory(PlanCacheBytes(config));
    if (error_rate > 0.3) config.max_step_ms = 100;
    SpeculatingEngine speculating(config, error_rate, number == 0 ? 7 : 4);
    std::vector<Request> requests;
    std::map<std::string, Collected> want;
    for (int i = 0; i < 24; ++i) {
      requests.push_back(RandomRequest(random, stems, number++));
      SamplingParams& params = requests.back().sampling;
      if (i % 5 == 0)
        params.stop_token_ids = {static_cast<int32_t>(random() % 96), static_cast<int32_t>(random() % 96)};
      if (i % 7 == 0) params.min_tokens = params.max_tokens / 2;
      if (i % 6 == 0) params.logit_bias = {{static_cast<int32_t>(random() % 96), 2.0F}};
      want[requests.back().id] = RunOne(plain, requests.back());
      speculating.Teach(requests.back(), want[requests.back().id]);
    }
    Engine::Impl& engine = *speculating.engine;
    std::map<std::string, Collected> got;
    std::vector<RequestOutput> outputs;
    size_t added = 0;
    while (true) {
      while (added < requests.size() && random() % 3 != 0) engine.Add(requests[added++]);
      if (!engine.Step(outputs) && added == requests.size()) break;
      Collect(outputs, got);
    }
    for (const Request& request : requests) ExpectEqual(got[request.id], want[request.id], request.id);
    const EngineStats stats = engine.Stats();
    EXPECT_GT(stats.accepted_tokens, 50);
    EXPECT_EQ(stats.accepted_tokens<stats.draft_tokens, error_rate> 0);
    preemptions += stats.preemptions;
    hits += stats.cached_tokens;
    engine.ResetPrefixCache();
    EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << "references leaked";
  }
  EXPECT_TRUE(preemptions > 0 || GetParam().hybrid) << "windows leave more room";
  EXPECT_GT(hits, 0);
}

// A page that closed with rejected tokens would keep them: later requests read it from the prefix cache.
TEST_P(SpeculationOver, LeavesThePagesOfPlainDecoding) {
  const EngineConfig config = ConfigOf(GetParam());
  std::mt19937_64 random(600);
  const Request request{.id = "a", .prompt = RandomTokens(random, 20), .sampling = Greedy(100)};
  Engine plain(config);
  const Collected want = RunOne(plain, request);
  SpeculatingEngine speculating(config, 0.3, 5);
  speculating.Teach(request, want);
  ExpectEqual(RunOne(*speculating.engine, request), want, "a");
  EXPECT_GT(speculating.engine->Stats().accepted_tokens, 30);
  std::vector<int32_t> tokens = request.prompt;
  tokens.insert(tokens.end(), want.tokens.begin(), want.tokens.end());
  for (int group = 0; group < static_cast<int>(plain.Stats().groups.size()); ++group) {
    int pages = 0;
    for (int page = 0; (page + 1) * config.page_size < std::ssize(tokens); ++page) {
      std::vector<uint8_t> bytes;
      try {
        bytes = plain.ExportPage(tokens, page, group);
      } catch (const InputError&) {
        continue;  // already outside a window
      }
      EXPECT_EQ(speculating.engine->ExportPage(tokens, page, group), bytes) << "page " << page;
      ++pages;
    }
    EXPECT_GT(pages, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, SpeculationOver, testing::ValuesIn(kCases), NameOf);

Request LongRequest(int max_tokens) {
  std::mt19937_64 random(8);
  return {.id = "a", .prompt = RandomTokens(random, 10), .sampling = Greedy(max_tokens)};
}

TEST(Speculation, RightDraftsSaveSteps) {
  const Request request = LongRequest(90);
  Engine plain(TinyConfig(Model(), "int4"));
  const Collected want = RunOne(plain, request);
  SpeculatingEngine speculating(TinyConfig(Model(), "int4"), 0.0, 5);
  speculating.Teach(request, want);
  ExpectEqual(RunOne(*speculating.engine, request), want, "a");
  const EngineStats stats = speculating.engine->Stats();
  EXPECT_EQ(stats.accepted_tokens, stats.draft_tokens);
  EXPECT_EQ(stats.generated_tokens, 90);
  EXPECT_EQ(stats.steps + stats.accepted_tokens, 90) << "each accepted token saves a step";
  EXPECT_LT(stats.steps, 30);
  EXPECT_EQ(stats.accepted_per_position.size(), 5u);
  EXPECT_EQ(stats.accepted_per_position.front(), stats.drafts);
}

TEST(Speculation, WrongDraftsCostFewRows) {
  const Request request = LongRequest(110);
  Engine plain(TinyConfig(Model(), "int4"));
  const Collected want = RunOne(plain, request);
  SpeculatingEngine speculating(TinyConfig(Model(), "int4"), 1.0);
  speculating.Teach(request, want);
  ExpectEqual(RunOne(*speculating.engine, request), want, "a");
  const EngineStats stats = speculating.engine->Stats();
  EXPECT_EQ(stats.accepted_tokens, 0);
  EXPECT_EQ(stats.steps, 110);
  EXPECT_GE(stats.drafts, 17) << "it tries again";
  EXPECT_LE(stats.drafts, 24);
}

TEST(Speculation, EndsInsideADraft) {
  Engine plain(TinyConfig(Model(), "int4"));
  const Collected all = RunOne(plain, LongRequest(60));
  std::vector<Request> requests;
  for (int end = 1; end <= 40; ++end) {
    requests.push_back(LongRequest(end));
    requests.push_back(LongRequest(60));
    requests.back().sampling.stop_token_ids = {all.tokens[static_cast<size_t>(end)]};
    requests.push_back(requests.back());
    requests.back().sampling.min_tokens = end;
  }
  SpeculatingEngine speculating(TinyConfig(Model(), "int4"), 0.0, 6);
  speculating.Teach(LongRequest(60), all);
  for (const Request& request : requests) {
    ExpectEqual(RunOne(*speculating.engine, request), RunOne(plain, request),
                fmt::format("max {} min {}", request.sampling.max_tokens, request.sampling.min_tokens));
  }
}

TEST(Speculation, EndsAtMaxModelLen) {
  EngineConfig config = TinyConfig(Model(), "int8");
  for (int length = 60; length < 68; ++length) {
    config.max_model_len = length;
    Engine plain(config);
    const Collected want = RunOne(plain, LongRequest(100));
    SpeculatingEngine speculating(config, 0.0, 6);
    speculating.Teach(LongRequest(100), want);
    ExpectEqual(RunOne(*speculating.engine, LongRequest(100)), want, std::to_string(length));
  }
}

// Each output says how many of its tokens were draft tokens.
TEST(Speculation, OutputsCountTheirDrafts) {
  Engine plain(TinyConfig(Model(), "int4"));
  const Collected want = RunOne(plain, LongRequest(60));
  SpeculatingEngine speculating(TinyConfig(Model(), "int4"), 0.3);
  speculating.Teach(LongRequest(60), want);
  speculating.engine->Add(LongRequest(60));
  std::vector<RequestOutput> outputs;
  int64_t drafted = 0;
  int64_t accepted = 0;
  while (speculating.engine->Step(outputs)) {
    for (const RequestOutput& output : outputs) {
      EXPECT_THAT(output.accepted_tokens, testing::AnyOf(output.tokens.size(), output.tokens.size() - 1));
      EXPECT_LE(output.accepted_tokens, output.draft_tokens);
      drafted += output.draft_tokens;
      accepted += output.accepted_tokens;
    }
  }
  EXPECT_EQ(drafted, speculating.engine->Stats().draft_tokens);
  EXPECT_EQ(accepted, speculating.engine->Stats().accepted_tokens);
  EXPECT_GT(accepted, 0);
}

TEST(Speculation, LargeBatchesGetFewOrNoDrafts) {
  EngineConfig config = TinyConfig(Model(), "bf16");
  config.max_num_seqs = 80;
  config.max_num_batched_tokens = 256;
  config.kv_cache_memory_bytes = 32 << 20;
  Engine plain(config);
  const Collected want = RunOne(plain, LongRequest(30));
  for (const int sequences : {1, 40, 64}) {
    SpeculatingEngine speculating(config, 0.0);
    speculating.Teach(LongRequest(30), want);
    for (int i = 0; i < sequences; ++i) {
      Request request = LongRequest(30);
      request.id = std::to_string(i);
      speculating.engine->Add(request);
    }
    for (const auto& [id, got] : RunAll(*speculating.engine)) EXPECT_EQ(got.tokens, want.tokens);
    const EngineStats stats = speculating.engine->Stats();
    const double share = static_cast<double>(stats.accepted_tokens) / static_cast<double>(stats.generated_tokens);
    EXPECT_NEAR(share, sequences == 1 ? 0.7 : sequences == 40 ? 0.35 : 0, 0.15);
  }
}

// The real proposer, with few tokens to choose from.
TEST(Speculation, NgramsSpeedUpRepetition) {
  EngineConfig config = TinyConfig(Model(), "int4");
  Engine plain(config);
  config.speculative_config = R"({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4,
                                  "prompt_lookup_min": 2})";
  Engine engine(config);
  std::mt19937_64 random(9);
  for (int i = 0; i < 10; ++i) {
    Request request = LongRequest(100);
    request.prompt = RandomTokens(random, 5);
    request.sampling.logprobs = 1;
    for (int token = 10; token < 14; ++token) request.sampling.logit_bias.emplace_back(token, 100.0F);
    ExpectEqual(RunOne(engine, request), RunOne(plain, request), std::to_string(i));
  }
  EXPECT_GT(engine.Stats().accepted_tokens, 100);
}

}  // namespace
}  // namespace kvanta::engine
