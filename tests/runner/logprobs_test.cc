#include "runner/logprobs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "runner/random_logits.h"

namespace kvanta::runner {
namespace {

TEST(Logprobs, AgreeWithDouble) {
  const auto logits = RandomLogits(5000, 3);
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x));
  const auto result = ComputeLogprobs(logits, 17, 5);
  ASSERT_EQ(result.size(), 6u);
  EXPECT_EQ(result[0].token, 17);
  for (const TokenLogprob& entry : result) {
    // f32 result of magnitude up to ~20, exponentials of relative error 3e-7.
    EXPECT_NEAR(entry.logprob, logits[static_cast<size_t>(entry.token)] - std::log(sum), 3e-6);
    int rank = 1;
    for (const float x : logits) rank += x > logits[static_cast<size_t>(entry.token)] ? 1 : 0;
    EXPECT_EQ(entry.rank, rank);
  }
  for (size_t i = 2; i < result.size(); ++i) EXPECT_GE(result[i - 1].logprob, result[i].logprob);
}

TEST(Logprobs, OfGivenTokens) {
  const auto logits = RandomLogits(5000, 4);
  const auto alone = ComputeLogprobs(logits, 17, 2);
  const std::vector<int32_t> tokens = {4999, 17, 0};
  const auto result = ComputeLogprobs(logits, 17, 2, tokens);
  ASSERT_EQ(result.size(), alone.size() + tokens.size());
  for (size_t i = 0; i < alone.size(); ++i) EXPECT_EQ(result[i].token, alone[i].token);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const TokenLogprob &got = result[alone.size() + i], own = ComputeLogprobs(logits, tokens[i], 0)[0];
    EXPECT_EQ(std::tuple(got.token, got.logprob, got.rank), std::tuple(tokens[i], own.logprob, own.rank));
  }
}

TEST(Logprobs, RanksOfManyTokensCountThoseBefore) {
  std::vector<float> logits = RandomLogits(700, 5);
  for (float& logit : logits) logit = std::round(logit);  // many are equal
  std::vector<int32_t> tokens;
  for (int32_t token = 699; token >= 0; token -= 3) tokens.insert(tokens.end(), {token, token});
  const auto result = ComputeLogprobs(logits, 2, 0, tokens);
  ASSERT_EQ(result.size(), 1 + tokens.size());
  for (const TokenLogprob& entry : result) {
    int rank = 1;
    const float own = logits[static_cast<size_t>(entry.token)];
    for (size_t i = 0; i < logits.size(); ++i) {
      rank += logits[i] > own || (logits[i] == own && static_cast<int32_t>(i) < entry.token) ? 1 : 0;
    }
    EXPECT_EQ(entry.rank, rank) << entry.token;
  }
}

TEST(Logprobs, EqualLogitsRankById) {
  const auto result = ComputeLogprobs(std::vector<float>{1, 2, 2, 0}, 2, 3);
  ASSERT_EQ(result.size(), 4u);
  EXPECT_EQ(result[0].rank, 2);
  EXPECT_EQ(result[1].token, 1);
  EXPECT_EQ(result[2].token, 2);
  EXPECT_EQ(result[3].token, 0);
}

}  // namespace
}  // namespace kvanta::runner
