// The parts of speculative decoding: n-gram lookup, pauses, options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "engine/draft_control.h"
#include "engine/ngram_proposer.h"
#include "engine/requests.h"
#include "engine/speculative_config.h"
#include "kvanta/error.h"

namespace kvanta::engine {
namespace {

std::vector<int32_t> Propose(NgramProposer& proposer, DraftProposer::State& state, const std::vector<int32_t>& tokens,
                             int count) {
  std::vector<int32_t> draft;
  const runner::SamplerState sampler({}, 0, {}, {});
  DraftProposer::Item item{
      .state = state, .tokens = tokens, .count = count, .sampler = sampler, .stop_tokens = {}, .draft = draft};
  proposer.Propose({&item, 1});
  return draft;
}

std::vector<int32_t> ProposeOnce(int min, int max, const std::vector<int32_t>& tokens, int count) {
  NgramProposer proposer(min, max);
  return Propose(proposer, *proposer.MakeState(""), tokens, count);
}

TEST(NgramProposer, TakesTheLongestMatchAndTheLatestOfThem) {
  using Tokens = std::vector<int32_t>;
  EXPECT_EQ(ProposeOnce(2, 3, {1, 2, 3, 9, 2, 3, 8, 1, 2, 3}, 2), (Tokens{9, 2})) << "three tokens over two";
  EXPECT_EQ(ProposeOnce(2, 2, {1, 2, 3, 9, 2, 3, 8, 1, 2, 3}, 2), (Tokens{8})) << "the later one";
  EXPECT_EQ(ProposeOnce(2, 4, {5, 6, 7, 8}, 2), Tokens{});
  EXPECT_EQ(ProposeOnce(2, 4, {5, 6, 4, 6}, 2), Tokens{}) << "one token is less than min";
  EXPECT_EQ(ProposeOnce(1, 4, {5, 6, 4, 6}, 2), (Tokens{4}));
  EXPECT_EQ(ProposeOnce(1, 1, {5}, 2), Tokens{});
  EXPECT_EQ(ProposeOnce(3, 3, {5, 5}, 2), Tokens{});
}

TEST(NgramProposer, GoesOnWithItsOwnDraft) {
  EXPECT_EQ(ProposeOnce(2, 4, {1, 2, 1, 2, 1, 2}, 5), (std::vector<int32_t>{1, 2, 1, 2, 1}));
  EXPECT_EQ(ProposeOnce(1, 4, {7, 7, 7, 7}, 3), (std::vector<int32_t>{7, 7, 7}));
}

// Also of tokens beyond prompt_lookup_max.
TEST(NgramProposer, LongMatchesGiveLongDrafts) {
  std::vector<int32_t> text(40);
  std::iota(text.begin(), text.end(), 1);
  for (const int match : {2, 3, 4, 9}) {
    std::vector<int32_t> tokens = text;
    tokens.insert(tokens.end(), text.begin(), text.begin() + match);
    const std::vector<int32_t> draft = ProposeOnce(2, 4, tokens, 12);
    ASSERT_EQ(std::ssize(draft), std::min(12, 2 * match - 3));
    EXPECT_TRUE(std::equal(draft.begin(), draft.end(), text.begin() + match));
  }
}

// The index, token by token and in jumps, against a search over all positions.
TEST(NgramProposer, AgreesWithASearch) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 20; ++round) {
    const int min = static_cast<int>(random() % 3) + 1;
    const int max = min + static_cast<int>(random() % 3);
    NgramProposer proposer(min, max);
    const auto state = proposer.MakeState("");
    std::vector<int32_t> tokens = RandomTokens(random, 1 + static_cast<int64_t>(random() % 300), 12);
    for (int step = 0; step < 60; ++step) {
      int64_t best = -1;
      int64_t best_length = min - 1;
      for (auto end = std::ssize(tokens) - 1; end > 0; --end) {
        int64_t length = 0;
        while (length < std::min<int64_t>(max, end) && tokens[static_cast<size_t>(end - 1 - length)] ==
                                                           tokens[tokens.size() - 1 - static_cast<size_t>(length)]) {
          ++length;
        }
        if (length > best_length) {
          best = end;
          best_length = length;
        }
      }
      const auto draft = Propose(proposer, *state, tokens, 1);
      ASSERT_EQ(draft.size(), best < 0 ? 0u : 1u);
      if (best >= 0 && tokens.size() < 400) {  // a lookup tries a bounded number of positions
        ASSERT_EQ(draft[0], tokens[static_cast<size_t>(best)]) << tokens.size();
      }
      const auto more = RandomTokens(random, static_cast<int64_t>(random() % 4) + 1, 12);
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
  }
}

// Drafts that are verified in `steps` steps.
int Trials(DraftControl& control, int steps, int accepted, float min_acceptance) {
  int trials = 0;
  for (int step = 0; step < steps; ++step) {
    if (!control.Speculates()) continue;
    control.Record(4, accepted, min_acceptance);
    ++trials;
  }
  return trials;
}

TEST(DraftControl, PausesLongerWhileDraftsFail) {
  DraftControl control;
  const int trials = Trials(control, 1000, 0, 0.1F);
  EXPECT_GT(trials, 20);
  EXPECT_LT(trials, 30);
  EXPECT_GT(Trials(control, 1000, 4, 0.1F), 700) << "one draft that is accepted ends the pauses";
}

TEST(DraftControl, LoadDecidesHowManyMustBeAccepted) {
  DraftControl alone;
  EXPECT_EQ(Trials(alone, 100, 1, MinAcceptance(1, 1)), 100) << "a quarter pays for one sequence";
  DraftControl in_batch;
  EXPECT_LT(Trials(in_batch, 100, 1, MinAcceptance(16, 16)), 10) << "and not for 16";
  EXPECT_GT(Trials(in_batch, 400, 4, MinAcceptance(16, 16)), 200);
  EXPECT_LT(MinAcceptance(1, 64), MinAcceptance(1, 1)) << "next to a prompt, a row is a smaller part of the step";
  EXPECT_LT(MinAcceptance(64, 64), 1);
}

std::string ConfigErrorOf(const std::string& text) {
  try {
    ParseSpeculativeConfig(text);
  } catch (const InputError& error) {
    return error.what();
  }
  return "";
}

TEST(SpeculativeConfig, RefusesWithKeyValueAndAlternatives) {
  using testing::HasSubstr;
  EXPECT_THAT(ConfigErrorOf("{"), HasSubstr("speculative_config"));
  EXPECT_THAT(ConfigErrorOf("[1]"), HasSubstr("expected an object"));
  EXPECT_THAT(ConfigErrorOf(R"({"method": "eagle"})"),
              HasSubstr("method 'eagle' is not supported; there are: ngram, draft_model"));
  EXPECT_THAT(ConfigErrorOf(R"({"tokens": 4})"), HasSubstr("num_speculative_tokens"));
  EXPECT_THAT(ConfigErrorOf(R"({"num_speculative_tokens": 0})"), HasSubstr("is 0; expected an integer from 1 to"));
  EXPECT_THAT(ConfigErrorOf(R"({"num_speculative_tokens": "4"})"), HasSubstr("expected an integer"));
  EXPECT_THAT(ConfigErrorOf(R"({"prompt_lookup_min": 5, "prompt_lookup_max": 4})"),
              HasSubstr("above prompt_lookup_max 4"));
  EXPECT_EQ(ConfigErrorOf(R"({"method": "ngram"})"), "");
  EXPECT_EQ(ParseSpeculativeConfig(R"({"prompt_lookup_max": 3})").prompt_lookup_min, 3);
  EXPECT_EQ(ParseSpeculativeConfig(R"({"prompt_lookup_min": 6})").prompt_lookup_max, 6);
  EngineConfig config = TinyConfig(Model(), "bf16");
  config.speculative_config = "{}}";
  EXPECT_THROW(Engine{config}, InputError);
}

}  // namespace
}  // namespace kvanta::engine
