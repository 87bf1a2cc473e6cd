// Rows without logits skip the last layer's MLP and the final norm; the others keep their bits.
#include <gtest/gtest.h>

#include <string>

#include "engine/requests.h"
#include "runner/logprobs.h"

namespace kvanta::engine {
namespace {

// Calls of the MLPs' first linear layer.
int64_t MlpCalls(const Engine& engine) {
  int64_t calls = 0;
  for (const ProfileRow& row : engine.Stats().profile) {
    if (row.name == "linear gate_proj|up_proj") calls += row.calls;
  }
  return calls;
}

TEST(OutputRows, ChunksWithoutLogitsSkipTheLastMlp) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.profile = true;
  config.enable_prefix_caching = false;
  Engine engine(config);
  std::mt19937_64 random(3);
  Request request{.id = "a", .prompt = RandomTokens(random, 100), .sampling = Greedy(1)};
  EXPECT_EQ(RunOne(engine, request).tokens.size(), 1u);
  EXPECT_EQ(MlpCalls(engine), 1 + 2) << "two layers, two chunks, of which the first has no logits";
  request.sampling.prompt_logprobs = 0;
  EXPECT_EQ(RunOne(engine, request).prompt_logprobs.size(), 100u);
  EXPECT_EQ(MlpCalls(engine), 3 + 4);
  engine.CollectStatistics(request.prompt);
  EXPECT_EQ(MlpCalls(engine), 7 + 2) << "statistics need no logits";
}

void ExpectEqual(const TokenLogprob& a, const TokenLogprob& b) {
  EXPECT_EQ(a.token, b.token);
  EXPECT_EQ(a.logprob, b.logprob);
  EXPECT_EQ(a.rank, b.rank);
}

TEST(OutputRows, KeepTheirBits) {
  const TinyModel experts({.rank = 64, .experts = 6});
  for (const auto& [model, format] : {std::pair(&Model(), "int4"), std::pair(&experts, "mla_fp8")}) {
    Engine engine(TinyConfig(*model, format));
    std::mt19937_64 random(4);
    std::vector<Request> requests;
    for (const int prompt_tokens : {100, 1, 23}) {
      Request request{.id = std::to_string(prompt_tokens), .prompt = RandomTokens(random, prompt_tokens)};
      request.sampling = Greedy(5);
      request.sampling.logprobs = 3;
      if (prompt_tokens == 23) request.sampling.prompt_logprobs = 2;
      if (prompt_tokens == 1) request.sampling.logprob_token_ids = {95, 0};
      requests.push_back(request);
      engine.Add(request);
    }
    const auto results = RunAll(engine);
    for (const Request& request : requests) {
      const Collected& got = results.at(request.id);
      std::vector<int32_t> tokens = request.prompt;
      tokens.insert(tokens.end(), got.tokens.begin(), got.tokens.end());
      const std::vector<float> logits = ColdLogits(engine, tokens);
      const auto expected = [&](size_t position, int count) {
        return runner::ComputeLogprobs(std::span(logits).subspan((position - 1) * 96, 96), tokens[position], count,
                                       request.sampling.logprob_token_ids);
      };
      for (size_t i = 0; i < got.tokens.size(); ++i) {
        const auto logprobs = expected(request.prompt.size() + i, 3);
        ASSERT_EQ(got.logprobs[i].size(), logprobs.size());
        for (size_t j = 0; j < logprobs.size(); ++j) ExpectEqual(got.logprobs[i][j], logprobs[j]);
      }
      for (size_t position = 1; position < got.prompt_logprobs.size(); ++position) {
        ExpectEqual(got.prompt_logprobs[position][0], expected(position, 2)[0]);
      }
    }
  }
}

}  // namespace
}  // namespace kvanta::engine
