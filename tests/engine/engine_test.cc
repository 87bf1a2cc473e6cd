// Contract of the engine: outputs, stop conditions, errors, aborts, accounting.
#include "kvanta/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "engine/requests.h"

namespace kvanta::engine {
namespace {

std::string MessageOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Engine, GreedySamplesTheArgmaxOfItsLogits) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::mt19937_64 random(1);
  const auto prompt = RandomTokens(random, 21);
  const Collected result = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(40)});
  ASSERT_EQ(result.tokens.size(), 40u);
  EXPECT_EQ(result.finish, FinishReason::kLength);
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), result.tokens.begin(), result.tokens.end());
  const auto logits = ColdLogits(engine, all);
  for (size_t i = prompt.size(); i < all.size(); ++i) {
    const auto row = logits.begin() + static_cast<long>((i - 1) * 96);
    EXPECT_EQ(std::max_element(row, row + 96) - row, all[i]) << "token " << i;
  }
  EXPECT_GT(std::set<int32_t>(result.tokens.begin(), result.tokens.end()).size(), 3u) << "too dull to test anything";
}

TEST(Engine, ASeedDecidesTheTokensWhateverTheId) {
  Engine engine(TinyConfig(Model(), "int8"));
  const auto tokens = [&engine](const char* id, uint64_t seed) {
    Request request{.id = id, .prompt = {5, 6, 7}, .sampling = Greedy(20)};
    request.sampling.temperature = 1.0F;
    request.sampling.seed = seed;
    return RunOne(engine, request).tokens;
  };
  EXPECT_EQ(tokens("a", 1), tokens("b", 1));
  EXPECT_NE(tokens("a", 1), tokens("a", 2));
}

// Prefill multiplies many rows at once, decode one: integer dots must not make a difference.
TEST(Engine, QuantizedWeightsGiveARowTheSameBitsInAnyBatch) {
  for (const char* type : {"int8", "int4"}) {
    EngineConfig config = TinyConfig(Model(), "int8");
    config.weight_dtype = type;
    Engine engine(config);
    EXPECT_EQ(engine.Config().weight_dtype, type);
    std::mt19937_64 random(1);
    const auto prompt = RandomTokens(random, 21);
    const Collected result = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(40)});
    std::vector<int32_t> all = prompt;
    all.insert(all.end(), result.tokens.begin(), result.tokens.end());
    const auto logits = ColdLogits(engine, all);
    for (size_t i = prompt.size(); i < all.size(); ++i) {
      const auto row = logits.begin() + static_cast<long>((i - 1) * 96);
      EXPECT_EQ(std::max_element(row, row + 96) - row, all[i]) << type << ", token " << i;
    }
  }
}

TEST(Engine, StopsAtStopTokensAndLengths) {
  Engine engine(TinyConfig(Model(), "bf16"));
  std::mt19937_64 random(2);
  const auto prompt = RandomTokens(random, 10);
  const auto free = RunOne(engine, {.id = "free", .prompt = prompt, .sampling = Greedy(20)});
  SamplingParams params = Greedy(20);
  params.stop_token_ids = {free.tokens[7]};
  const auto first = std::find(free.tokens.begin(), free.tokens.end(), free.tokens[7]) - free.tokens.begin();
  const auto stopped = RunOne(engine, {.id = "stopped", .prompt = prompt, .sampling = params});
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.stop_token, free.tokens[7]);
  EXPECT_EQ(static_cast<long>(stopped.tokens.size()), first + 1);
  params.min_tokens = 12;
  const auto later = RunOne(engine, {.id = "later", .prompt = prompt, .sampling = params});
  EXPECT_GE(later.tokens.size(), 12u);
  params = Greedy(1000);
  const auto full = RunOne(engine, {.id = "full", .prompt = prompt, .sampling = params});
  EXPECT_EQ(full.finish, FinishReason::kLength);
  EXPECT_EQ(static_cast<int64_t>(full.tokens.size() + prompt.size()), engine.Config().max_model_len);
}

TEST(Engine, LogprobsAreThoseOfTheLogits) {
  Engine engine(TinyConfig(Model(), "int4"));
  std::mt19937_64 random(3);
  const auto prompt = RandomTokens(random, 70);
  SamplingParams params = Greedy(5);
  params.logprobs = 3;
  params.prompt_logprobs = 2;
  const auto result = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = params});
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), result.tokens.begin(), result.tokens.end());
  const auto logits = ColdLogits(engine, all);
  const auto expected = [&](size_t row, int32_t token) {
    double sum = 0;
    for (size_t i = 0; i < 96; ++i) sum += std::exp(static_cast<double>(logits[row * 96 + i]));
    return logits[row * 96 + static_cast<size_t>(token)] - std::log(sum);
  };
  ASSERT_EQ(result.prompt_logprobs.size(), prompt.size());
  EXPECT_TRUE(result.prompt_logprobs[0].empty());
  for (size_t i = 1; i < prompt.size(); ++i) {
    ASSERT_EQ(result.prompt_logprobs[i].size(), 3u);
    EXPECT_EQ(result.prompt_logprobs[i][0].token, prompt[i]);
    // f32 logits of magnitude ~10, exponentials of relative error 3e-7.
    for (const TokenLogprob& entry : result.prompt_logprobs[i]) {
      EXPECT_NEAR(entry.logprob, expected(i - 1, entry.token), 5e-6);
    }
  }
  ASSERT_EQ(result.logprobs.size(), 5u);
  for (size_t i = 0; i < 5; ++i) {
    ASSERT_EQ(result.logprobs[i].size(), 4u);
    EXPECT_EQ(result.logprobs[i][0].token, result.tokens[i]);
    EXPECT_EQ(result.logprobs[i][0].rank, 1);
    EXPECT_NEAR(result.logprobs[i][0].logprob, expected(prompt.size() + i - 1, result.tokens[i]), 5e-6);
  }
}

TEST(Engine, RefusesInvalidRequests) {
  Engine engine(TinyConfig(Model(), "int8"));
  const auto add = [&](std::vector<int32_t> prompt, const SamplingParams& params = Greedy(4)) {
    return MessageOf([&] { engine.Add({.id = "a", .prompt = std::move(prompt), .sampling = params}); });
  };
  EXPECT_EQ(add({}), "the prompt is empty: at least one token is needed");
  EXPECT_EQ(add({1, 96}), "token 96 at position 1 of the prompt: the model's ids are 0 to 95");
  EXPECT_EQ(add({-1}), "token -1 at position 0 of the prompt: the model's ids are 0 to 95");
  EXPECT_EQ(add(std::vector<int32_t>(128, 1)),
            "the prompt has 128 tokens: with one token to generate, max_model_len = 128 allows 127");
  SamplingParams bad = Greedy(0);
  EXPECT_EQ(add({1}, bad), "sampling parameter max_tokens = 0: must be at least 1");
  EXPECT_EQ(add({1}), "no error");
  EXPECT_EQ(add({1}), "request id 'a' is in use by an unfinished request");
  RunAll(engine);
  EXPECT_EQ(add({1}), "no error") << "a finished request's id is free again";
}

TEST(Engine, RefusesBadConfigs) {
  const auto with = [&](const std::function<void(EngineConfig&)>& change) {
    EngineConfig config = TinyConfig(Model(), "int8");
    change(config);
    return MessageOf([&] { const Engine engine(config); });
  };
  EXPECT_NE(with([](auto& c) { c.kv_cache_dtype = "int9"; }).find("int9"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.dtype = "float8"; }).find("float8"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.weight_dtype = "int3"; }).find("'int3'"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.device = "cuda"; }).find("auto, cpu"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.isa = "avx9"; }).find("avx9"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.page_size = 24; }).find("24"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.max_num_batched_tokens = 15; }).find("15"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.max_num_seqs = 0; }).find("max_num_seqs"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.max_model_len = 513; }).find("513"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.kv_cache_memory_bytes = 20000; }).find("20000"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.kv_cache_dtype_skip_layers = {"2"}; }).find("'2'"), std::string::npos);
  EXPECT_NE(with([](auto& c) { c.kv_cache_dtype_layers = "7=bf16"; }).find("7"), std::string::npos);
  EXPECT_EQ(with([](auto&) {}), "no error");
}

TEST(Engine, ShrinksAnUnsetMaxModelLenToTheCache) {
  EngineConfig config = TinyConfig(Model(), "bf16");
  config.max_model_len = 0;
  config.kv_cache_memory_bytes = 100000;  // 512 bytes per token
  std::string warning;
  config.on_warning = [&](const std::string& message) { warning = message; };
  const Engine engine(config);
  EXPECT_EQ(engine.Config().max_model_len, 100000 / (16 * 512) * 16);
  EXPECT_NE(warning.find("max_model_len is 192"), std::string::npos) << warning;
}

TEST(Engine, SkipsLayersAndReportsSchemes) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_dtype_skip_layers = {"-1"};
  const Engine engine(config);
  const EngineStats stats = engine.Stats();
  EXPECT_EQ(stats.layers[0].scheme, KvScheme::Parse("int4").ToString());
  EXPECT_EQ(stats.layers[1].scheme, KvScheme::Parse("fp32").ToString()) << "the model's dtype";
}

TEST(Engine, BytesPerTokenAreThePlans) {
  for (const char* format : {"bf16", "fp8_e4m3", "int8", "int4", "k=int8,v=int4"}) {
    EngineConfig config = TinyConfig(Model(), format);
    Engine engine(config);
    const CachePlan plan = PlanCacheBytes(config);
    std::mt19937_64 random(4);
    RunOne(engine, {.id = "a", .prompt = RandomTokens(random, 96), .sampling = Greedy(1)});
    const EngineStats stats = engine.Stats();
    EXPECT_EQ(plan.page_bytes, stats.page_bytes);
    EXPECT_EQ(plan.exact_page_bytes, stats.exact_page_bytes);
    EXPECT_EQ(plan.bytes_per_token, stats.bytes_per_token);
    EXPECT_EQ(stats.prefix_pages, 6);
    EXPECT_EQ(stats.cache_used_bytes,
              stats.pages_used * plan.page_bytes + stats.exact_pages_used * plan.exact_page_bytes);
    EXPECT_EQ(stats.pages_used + stats.exact_pages_used, 6) << "each page has one record: a sink's is exact";
  }
}

TEST(Engine, AbortFreesPagesAtOnce) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.enable_prefix_caching = false;
  Engine engine(config);
  std::mt19937_64 random(5);
  engine.Add({.id = "a", .prompt = RandomTokens(random, 100), .sampling = Greedy(20)});
  engine.Add({.id = "b", .prompt = RandomTokens(random, 10), .sampling = Greedy(20)});
  std::vector<RequestOutput> outputs;
  for (int i = 0; i < 3; ++i) engine.Step(outputs);
  EXPECT_GT(engine.Stats().cache_used_bytes, 0);
  engine.Abort("a");
  engine.Abort("nobody");
  engine.Abort("b");
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
  EXPECT_EQ(engine.Stats().running, 0);
  ASSERT_TRUE(engine.Step(outputs));
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0].id, "a");
  EXPECT_EQ(outputs[0].finish, FinishReason::kAbort);
  EXPECT_FALSE(engine.Step(outputs));
  engine.Add({.id = "c", .prompt = {1}, .sampling = Greedy(2)});
  engine.Abort("c");  // not even scheduled
  ASSERT_TRUE(engine.Step(outputs));
  EXPECT_EQ(outputs[0].finish, FinishReason::kAbort);
}

TEST(Engine, CountsPrefixHitsAndResetsThePrefixCache) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::mt19937_64 random(6);
  const auto prompt = RandomTokens(random, 50);
  EXPECT_EQ(RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(3)}).cached_tokens, 0);
  EXPECT_EQ(RunOne(engine, {.id = "b", .prompt = prompt, .sampling = Greedy(3)}).cached_tokens, 48);
  EXPECT_EQ(RunOne(engine, {.id = "c", .prompt = prompt, .sampling = Greedy(3), .cache_salt = "x"}).cached_tokens, 0);
  EXPECT_EQ(engine.Stats().cached_tokens, 48);
  EXPECT_EQ(engine.Stats().prompt_tokens, 50 + 2 + 50);
  SamplingParams skipping = Greedy(3);
  skipping.skip_reading_prefix_cache = true;
  EXPECT_EQ(RunOne(engine, {.id = "e", .prompt = prompt, .sampling = skipping}).cached_tokens, 0);
  engine.ResetPrefixCache();
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
  EXPECT_EQ(RunOne(engine, {.id = "d", .prompt = prompt, .sampling = Greedy(3)}).cached_tokens, 0);
}

TEST(Engine, CountsStepsByTheirTokens) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_batched_tokens = 32;
  Engine engine(config);
  std::mt19937_64 random(6);
  RunOne(engine, {.id = "a", .prompt = RandomTokens(random, 50), .sampling = Greedy(4)});
  std::array<int64_t, kStepTokenBounds.size() + 1> expected = {};
  expected[3] = 2;  // 9 to 32: two chunks of the prompt
  expected[0] = 3;
  EXPECT_EQ(engine.Stats().step_tokens, expected);
  EngineStats stats;
  for (const int64_t tokens : {1L, 2L, 8L, 9L, 16384L, 16385L}) stats.CountStepTokens(tokens);
  expected = {1, 2, 1};
  expected[12] = expected[13] = 1;
  EXPECT_EQ(stats.step_tokens, expected);
}

TEST(Engine, NonFiniteLogitsEndOnlyTheirRequest) {
  const TinyModel broken({}, 3e38F);  // finite weights, sums that overflow both ways
  Engine engine(TinyConfig(broken, "int8"));
  const auto result = RunOne(engine, {.id = "a", .prompt = {1, 2, 3}, .sampling = Greedy(3)});
  EXPECT_EQ(result.finish, FinishReason::kError);
  EXPECT_EQ(result.error, "the model's logits are not finite");
  EXPECT_EQ(engine.Stats().running, 0);
}

// A sequence gives the pages that its windows have passed back, with prefix caching as without: a cache of 6 pages
// holds sequences of any length.
TEST(Engine, WindowsAndPrefixesFitTheCacheTogether) {
  const TinyModel windowed({.sliding_window = 40});
  for (const bool prefixes : {true, false}) {
    EngineConfig config = TinyConfig(windowed, "int8");
    config.enable_prefix_caching = prefixes;
    config.max_model_len = 0;
    config.max_num_batched_tokens = 16;
    config.kv_cache_memory_bytes = 6 * PlanCacheBytes(config).page_bytes;
    Engine engine(config);
    const int64_t limit = engine.Config().max_model_len;
    EXPECT_EQ(limit, 512);
    std::mt19937_64 random(1);
    for (int i = 0; i < 3; ++i) {
      const auto prompt = RandomTokens(random, limit - 5);
      const Collected got = RunOne(engine, {.id = "a", .prompt = prompt, .sampling = Greedy(100)});
      EXPECT_EQ(got.error, "");
      EXPECT_EQ(got.tokens.size(), 5u);
    }
  }
}

TEST(Engine, AMeanWithoutAFileIsAnError) {
  for (const char* scheme : {"fp8_e4m3+mean", "k=int8+mean,v=fp8_e4m3"}) {
    EXPECT_THROW(Engine engine(TinyConfig(Model(), scheme)), InputError) << scheme;
  }
}

TEST(Engine, AHugeNumberOfSequencesDoesNotOverflowTheBudget) {
  EngineConfig config = TinyConfig(Model(), "bf16");
  config.kv_cache_memory_bytes = 0;
  config.max_num_seqs = std::numeric_limits<int>::max();
  EXPECT_EQ(Engine(config).Config().max_model_len, 128);
}

TEST(Engine, TheSmallestCacheHasAPageOfEachKind) {
  for (const char* format : {"bf16", "int4", "kivi4+exact=2", "k=nvfp4,v=int8"}) {
    EngineConfig config = TinyConfig(Model(), format);
    config.page_size = 64;
    config.max_model_len = 40;  // no page closes
    config.max_num_seqs = 1;
    config.kv_cache_memory_bytes = 0;
    Engine engine(config);
    EXPECT_EQ(engine.Config().max_model_len, 40);
    const auto output = RunOne(engine, {.id = "short", .prompt = {1, 2, 3}, .sampling = Greedy(30)});
    EXPECT_FALSE(output.tokens.empty()) << format;
  }
}

}  // namespace
}  // namespace kvanta::engine
