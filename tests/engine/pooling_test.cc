// Embeddings: the same bits in any batch, chunks, threads, after prefix hits and preemptions; limits and errors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "engine/requests.h"

namespace kvanta::engine {
namespace {

const PoolingParams kRawMean{.pooling_type = PoolingType::kMean, .normalize = false};
const PoolingParams kRawLast{.pooling_type = PoolingType::kLast, .normalize = false};

Request Pooled(std::string id, std::vector<int32_t> prompt, PoolingParams pooling) {
  return {.id = std::move(id), .prompt = std::move(prompt), .pooling = pooling};
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), 64u) << what;
  ASSERT_EQ(b.size(), 64u) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
  EXPECT_TRUE(std::isfinite(a.front())) << what;
}

TEST(Pooling, SameBitsInAnyBatchAndChunks) {
  for (const char* format : {"fp32", "int4", "kivi4+exact=2", "mla_fp8"}) {
    EngineConfig config = TinyConfig(ModelFor(format), format);
    config.max_num_batched_tokens = 128;  // a prompt in one chunk
    config.page_size = 32;
    config.enable_prefix_caching = false;
    Engine alone(config);
    config.max_num_batched_tokens = 40;
    config.threads = 3;
    config.kv_cache_memory_bytes = 2 * PlanCacheBytes(config).sequence_bytes;
    config.speculative_config = R"({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1})";
    Engine crowded(config);
    std::mt19937_64 random(5);
    std::map<std::string, Collected> expected;
    for (int i = 0; i < 24; ++i) {
      Request request = Pooled(std::to_string(i), RandomTokens(random, static_cast<int64_t>(random() % 120 + 1)),
                               i % 3 == 0 ? kRawLast : kRawMean);
      if (i % 4 == 1) {  // texts among them
        request.pooling.reset();
        request.prompt.resize(std::min<size_t>(request.prompt.size(), 20));
        request.sampling = Greedy(100);
        request.sampling.logprobs = 0;
        if (i % 8 == 1) request.sampling.prompt_logprobs = 0;
      }
      expected[request.id] = RunOne(alone, request);
      crowded.Add(request);
    }
    const auto found = RunAll(crowded);
    for (const auto& [id, want] : expected) {
      const Collected& got = found.at(id);
      EXPECT_EQ(got.tokens, want.tokens) << format << " " << id;
      ASSERT_EQ(got.prompt_logprobs.size(), want.prompt_logprobs.size());
      for (size_t i = 1; i < want.prompt_logprobs.size(); ++i) {
        EXPECT_EQ(got.prompt_logprobs[i][0].logprob, want.prompt_logprobs[i][0].logprob) << format << " " << id;
      }
      if (!want.tokens.empty()) continue;
      ExpectSameBits(got.embedding, want.embedding, fmt::format("{} {}", format, id));
    }
    EXPECT_GT(crowded.Stats().draft_tokens, 0) << format;
    EXPECT_EQ(crowded.Stats().pages_used, 0);
  }
}

// Texts that grow take the pages of embeddings in progress, of which a step computes one token.
TEST(Pooling, SameBitsAfterPreemption) {
  EngineConfig config = TinyConfig(Model(), "fp32");
  Engine alone(config);
  config.enable_prefix_caching = false;
  config.max_num_batched_tokens = 16;
  config.max_num_seqs = 17;
  config.kv_cache_memory_bytes = 8 * PlanCacheBytes(config).sequence_bytes;
  Engine crowded(config);
  std::mt19937_64 random(10);
  for (int i = 0; i < 15; ++i) {
    crowded.Add({.id = std::to_string(i), .prompt = RandomTokens(random, 10), .sampling = Greedy(90)});
  }
  std::map<std::string, Collected> expected;
  for (const auto& [id, pooling] : {std::pair("mean", kRawMean), std::pair("last", kRawLast)}) {
    const Request request = Pooled(id, RandomTokens(random, 100), pooling);
    expected[id] = RunOne(alone, request);
    crowded.Add(request);
  }
  const auto found = RunAll(crowded);
  EXPECT_GT(found.at("mean").preemptions, 0);
  for (const auto& [id, want] : expected) ExpectSameBits(found.at(id).embedding, want.embedding, id);
}

TEST(Pooling, LastMayUsePrefixHitsAndMeanComputesEveryToken) {
  Engine engine(TinyConfig(Model(), "int4"));
  std::mt19937_64 random(6);
  const std::vector<int32_t> prompt = RandomTokens(random, 100);
  const Collected mean = RunOne(engine, Pooled("a", prompt, kRawMean));
  const Collected last = RunOne(engine, Pooled("b", prompt, kRawLast));
  EXPECT_EQ(last.cached_tokens, 96) << "pages of the mean are shared";
  const Collected mean_again = RunOne(engine, Pooled("c", prompt, kRawMean));
  EXPECT_EQ(mean_again.cached_tokens, 0);
  ExpectSameBits(mean.embedding, mean_again.embedding, "mean");
  engine.ResetPrefixCache();
  const Collected cold = RunOne(engine, Pooled("d", prompt, kRawLast));
  EXPECT_EQ(cold.cached_tokens, 0);
  ExpectSameBits(last.embedding, cold.embedding, "last");
  EXPECT_NE(last.embedding, mean.embedding);
  EXPECT_EQ(engine.Stats().generated_tokens, 0);
}

TEST(Pooling, EndsWithOneOutput) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.quality_sample_rate = 1;
  Engine engine(config);
  std::mt19937_64 random(7);
  engine.Add(Pooled("a", RandomTokens(random, 100), {.dimensions = 10}));
  std::vector<RequestOutput> all, outputs;
  while (engine.Step(outputs)) all.insert(all.end(), outputs.begin(), outputs.end());
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].finish, FinishReason::kStop);
  EXPECT_TRUE(all[0].tokens.empty());
  ASSERT_EQ(all[0].embedding.size(), 10u);
  double squares = 0;
  for (const float x : all[0].embedding) squares += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_NEAR(squares, 1, 1e-6);
  const EngineStats stats = engine.Stats();
  EXPECT_EQ(stats.finished_stop, 1);
  EXPECT_EQ(stats.quality.pending + stats.quality.skipped, 0) << "there are no tokens to compare";
}

TEST(Pooling, APromptMayFillTheContext) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::mt19937_64 random(8);
  EXPECT_EQ(RunOne(engine, Pooled("a", RandomTokens(random, 128), kRawMean)).embedding.size(), 64u);
  EXPECT_THROW(engine.Add(Pooled("b", RandomTokens(random, 129), kRawMean)), InputError);
}

TEST(Pooling, RefusesWhatItCannotDo) {
  Engine engine(TinyConfig(Model(), "int8"));
  const auto message = [&](const Request& request) -> std::string {
    try {
      engine.Add(request);
    } catch (const InputError& error) {
      return error.what();
    }
    return "accepted";
  };
  Request request = Pooled("a", {1, 2, 3}, {.dimensions = 65});
  EXPECT_EQ(message(request), "dimensions = 65: must be between 1 and the model's hidden size, 64, or 0 (all)");
  request.pooling->dimensions = -1;
  EXPECT_NE(message(request), "accepted");
  request.pooling->dimensions = 64;
  request.sampling.prompt_logprobs = 0;
  EXPECT_EQ(message(request), "a request with pooling has no tokens: it cannot have prompt_logprobs");
  request.sampling.prompt_logprobs = -1;
  EXPECT_EQ(message(request), "accepted");
}

TEST(Pooling, StatesThatAreNotFiniteAreAnError) {
  const TinyModel model({.key_gain = 3e38F});
  Engine engine(TinyConfig(model, "fp32"));
  const Collected result = RunOne(engine, Pooled("a", {1, 2, 3, 4, 5, 6}, kRawMean));
  EXPECT_EQ(result.finish, FinishReason::kError);
  EXPECT_EQ(result.error, "the model's hidden states are not finite");
  EXPECT_EQ(engine.Stats().pages_used, 0);
}

TEST(Pooling, AbortFreesThePages) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.enable_prefix_caching = false;
  Engine engine(config);
  std::mt19937_64 random(9);
  engine.Add(Pooled("a", RandomTokens(random, 128), kRawMean));
  std::vector<RequestOutput> outputs;
  engine.Step(outputs);  // the first of two chunks
  EXPECT_TRUE(outputs.empty());
  EXPECT_GT(engine.Stats().pages_used, 0);
  engine.Abort("a");
  EXPECT_EQ(engine.Stats().pages_used, 0);
  EXPECT_EQ(RunAll(engine).at("a").finish, FinishReason::kAbort);
}

}  // namespace
}  // namespace kvanta::engine
