#include "runner/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>

#include "kvanta/error.h"
#include "runner/philox.h"
#include "runner/random_logits.h"
#include "runner/row_sampler.h"
#include "runner/softmax.h"
#include "runner/token_mask.h"

namespace kvanta::runner {
namespace {

int32_t SampleOnce(std::vector<float> logits, const SamplingParams& params, uint64_t seed = 1,
                   std::vector<int32_t> prompt = {}, std::vector<int32_t> output = {}, std::vector<int32_t> stop = {}) {
  SamplerState state(params, seed, prompt, std::move(stop));
  for (const int32_t token : output) state.Append(token);
  Sampler sampler;
  return sampler.Sample(logits, state);
}

SamplingParams Greedy() {
  SamplingParams params;
  params.temperature = 0;
  return params;
}

// The token after draft tokens equals the one after the same tokens as output.
TEST(Sampler, DraftsCountAsOutput) {
  std::mt19937_64 random(31);
  Sampler sampler;
  for (int round = 0; round < 200; ++round) {
    SamplingParams params;
    params.temperature = round % 3 == 0 ? 0.0F : 1.0F;
    if (round % 2 == 0) params.repetition_penalty = 1.5F;
    if (round % 4 < 2) params.frequency_penalty = 0.7F;
    if (round % 5 == 0) params.presence_penalty = 1.0F;
    if (round % 7 == 0) params.min_tokens = 4;
    const std::vector<int32_t> prompt = {1, 2, 3, 2};
    const std::vector<int32_t> drafts = {static_cast<int32_t>(random() % 6), static_cast<int32_t>(random() % 6), 4, 2};
    SamplerState state(params, random(), prompt, {5});
    state.Append(3);
    SamplerState appended = state;
    for (size_t count = 0; count <= drafts.size(); ++count) {
      std::vector<float> logits = RandomLogits(8, random());
      std::vector<float> same = logits;
      const auto before = std::span(drafts).first(count);
      ASSERT_EQ(sampler.Sample(logits, state, {}, {}, before), sampler.Sample(same, appended));
      ASSERT_EQ(logits, same) << "penalties differ";
      const auto ahead = state.NextSample(8, static_cast<int64_t>(count));
      const auto next = appended.NextSample(8);
      ASSERT_EQ(ahead.has_value(), next.has_value());
      ASSERT_EQ(ahead ? ahead->uniform : 0, next ? next->uniform : 0);
      if (count < drafts.size()) appended.Append(drafts[count]);
    }
  }
}

TEST(RowSampler, SamplesADraftUpToItsFirstWrongToken) {
  ThreadPool threads(2);
  RowSampler sampler(threads);
  const SamplerState state(Greedy(), 1, std::vector<int32_t>{1}, {});
  const std::vector<int32_t> draft = {3, 4, 9};
  const std::vector<int32_t> best = {3, 4, 5, 6};  // of the rows after 0, 1, 2 and 3 draft tokens
  std::vector<std::vector<float>> logits(8, std::vector<float>(10, 0.0F));
  std::vector<SampleRow> rows;
  for (size_t i = 0; i < 8; ++i) {  // two sequences
    logits[i][static_cast<size_t>(best[i % 4])] = 1;
    rows.push_back({.item = i / 4, .state = &state, .drafts = std::span(draft).first(i % 4)});
    rows.back().logits = logits[i];
  }
  sampler.Run(rows);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(rows[i].token, i % 4 == 3 ? -1 : best[i % 4]) << i;
}

// Known answers of Random123's kat_vectors, philox4x32-10.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, SamplesAreUniform) {
  double sum = 0;
  for (uint64_t i = 0; i < 100000; ++i) {
    const double u = UniformSample(42, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
  }
  EXPECT_NEAR(sum / 100000, 0.5, 5 * std::sqrt(1.0 / 12 / 100000));
}

TEST(Softmax, ExponentialIsAccurate) {
  for (float x = -86.9F; x <= 0; x += 0.0037F) {
    const double exact = std::exp(static_cast<double>(x));
    ASSERT_NEAR(ExpOfNegative(x) / exact, 1.0, 3e-7) << x;
  }
  EXPECT_EQ(ExpOfNegative(0.0F), 1.0F);
  EXPECT_EQ(ExpOfNegative(-INFINITY), 0.0F);
  EXPECT_EQ(ExpOfNegative(-1e30F), 0.0F);
}

TEST(Sampler, GreedySamplesTheLowestOfEqualMaxima) {
  EXPECT_EQ(SampleOnce({0.0F, 2.0F, 1.0F, 2.0F}, Greedy()), 1);
}

TEST(Sampler, AGivenArgmaxChangesNoToken) {
  SamplingParams biased = Greedy();
  biased.logit_bias = {{3, 100.0F}};
  SamplingParams drawn;
  drawn.top_p = 0.9F;
  for (const SamplingParams& params : {Greedy(), biased, drawn, SamplingParams{}}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      auto logits = RandomLogits(100, seed);
      auto same = logits;
      const auto largest = std::max_element(logits.begin(), logits.end());
      const kernels::RowArgmax max_value{*largest, static_cast<int32_t>(largest - logits.begin()), true};
      const SamplerState state(params, seed, {}, {});
      EXPECT_EQ(Sampler().Sample(logits, state, {}, max_value), Sampler().Sample(same, state));
    }
  }
}

TEST(Sampler, RefusesInvalidLogits) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float temperature : {0.0F, 1.0F}) {
    SamplingParams params;
    params.temperature = temperature;
    for (size_t at = 0; at < 19; ++at) {
      std::vector<float> logits(19, 0.5F);
      logits[at] = nan;
      EXPECT_EQ(SampleOnce(logits, params), Sampler::kInvalidLogits);
      logits[at] = INFINITY;
      EXPECT_EQ(SampleOnce(logits, params), Sampler::kInvalidLogits);
      logits[at] = -INFINITY;
      EXPECT_GE(SampleOnce(logits, params), 0);
    }
    EXPECT_EQ(SampleOnce(std::vector<float>(19, -INFINITY), params), Sampler::kInvalidLogits);
  }
}

// Frequencies of many draws against the exact distribution, for every path through the sampler.
void ExpectDistribution(const std::vector<float>& logits, const SamplingParams& params,
                        const std::vector<double>& exact) {
  constexpr int kDraws = 40000;
  std::vector<double> count(logits.size());
  for (int i = 0; i < kDraws; ++i) {
    const int32_t token = SampleOnce(logits, params, static_cast<uint64_t>(i));
    ASSERT_GE(token, 0);
    count[static_cast<size_t>(token)] += 1;
  }
  for (size_t i = 0; i < exact.size(); ++i) {
    if (exact[i] == 0) {
      EXPECT_EQ(count[i], 0) << "token " << i;
    } else {
      EXPECT_NEAR(count[i] / kDraws, exact[i], 5 * std::sqrt(exact[i] / kDraws)) << "token " << i;
    }
  }
}

// The definition, in double, with a full sort.
std::vector<double> Reference(const std::vector<float>& logits, const SamplingParams& params) {
  const size_t vocab = logits.size();
  std::vector<size_t> order(vocab);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(vocab);
  double total = 0;
  for (size_t i = 0; i < vocab; ++i) {
    p[i] = std::exp((static_cast<double>(logits[i]) - logits[order[0]]) / params.temperature);
    if (p[i] < params.min_p) p[i] = 0;
  }
  if (params.top_k > 0) {
    for (size_t i = static_cast<size_t>(params.top_k); i < vocab; ++i) p[order[i]] = 0;
  }
  for (const double x : p) total += x;
  double head = 0;
  double kept = 0;
  for (const size_t i : order) {
    if (head >= params.top_p * total) p[i] = 0;
    head += p[i];
    kept += p[i];
  }
  for (double& x : p) x /= kept;
  return p;
}

TEST(Sampler, SamplesTheDefinedDistribution) {
  const auto logits = RandomLogits(24, 5, 1.5F);
  for (const float temperature : {0.7F, 1.0F, 1.8F}) {
    for (const auto& [top_k, top_p, min_p] : std::vector<std::tuple<int, float, float>>{
             {0, 1.0F, 0.0F}, {5, 1.0F, 0.0F}, {0, 0.8F, 0.0F}, {0, 1.0F, 0.2F}, {8, 0.7F, 0.05F}, {0, 0.9F, 0.1F}}) {
      SamplingParams params;
      params.temperature = temperature;
      params.top_k = top_k;
      params.top_p = top_p;
      params.min_p = min_p;
      ExpectDistribution(logits, params, Reference(logits, params));
    }
  }
}

TEST(Sampler, StaysInTheNucleusOfALargeVocabulary) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const auto logits = RandomLogits(20000, seed, seed % 4 == 0 ? 0.1F : 3.0F);
    SamplingParams params;
    params.temperature = 0.5F + static_cast<float>(seed % 3);
    params.top_p = seed % 2 == 0 ? 0.5F : 0.95F;
    if (seed % 5 == 0) params.top_k = 40;
    const auto exact = Reference(logits, params);
    for (uint64_t draw = 0; draw < 20; ++draw) {
      const int32_t token = SampleOnce(logits, params, draw);
      EXPECT_GT(exact[static_cast<size_t>(token)], 0.0) << "seed " << seed;
    }
  }
}

TEST(Sampler, TopKOneIsGreedy) {
  SamplingParams params;
  params.top_k = 1;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const auto logits = RandomLogits(1000, seed);
    EXPECT_EQ(SampleOnce(logits, params, seed), SampleOnce(logits, Greedy()));
  }
}

TEST(Sampler, PenaltiesFollowTheirDefinition) {
  SamplingParams params = Greedy();
  params.repetition_penalty = 2.0F;
  EXPECT_EQ(SampleOnce({4.0F, 3.0F, -1.0F}, params, 1, {0}), 1) << "4 / 2 < 3: the prompt counts";
  EXPECT_EQ(SampleOnce({-1.0F, -1.5F}, params, 1, {0}), 1) << "-1 * 2 < -1.5";
  params = Greedy();
  params.presence_penalty = 1.5F;
  EXPECT_EQ(SampleOnce({2.0F, 1.0F}, params, 1, {0}), 0) << "the prompt does not count";
  EXPECT_EQ(SampleOnce({2.0F, 1.0F}, params, 1, {}, {0}), 1);
  params = Greedy();
  params.frequency_penalty = 0.4F;
  EXPECT_EQ(SampleOnce({2.0F, 1.0F}, params, 1, {}, {0, 0}), 0);
  EXPECT_EQ(SampleOnce({2.0F, 1.0F}, params, 1, {}, {0, 0, 0}), 1);
}

TEST(Sampler, MasksStopTokensUntilMinTokens) {
  SamplingParams params = Greedy();
  params.min_tokens = 2;
  EXPECT_EQ(SampleOnce({5.0F, 1.0F}, params, 1, {}, {1}, {0}), 1);
  EXPECT_EQ(SampleOnce({5.0F, 1.0F}, params, 1, {}, {1, 1}, {0}), 0);
}

TEST(Sampler, AppliesBias) {
  SamplingParams params = Greedy();
  params.logit_bias = {{1, 10.0F}};
  EXPECT_EQ(SampleOnce({5.0F, 1.0F}, params), 1);
}

TEST(Sampler, SeedAndIndexDetermineTheToken) {
  const auto logits = RandomLogits(500, 1, 1.0F);
  SamplingParams params;
  std::set<int32_t> by_seed;
  std::set<int32_t> by_index;
  for (int i = 0; i < 50; ++i) {
    by_seed.insert(SampleOnce(logits, params, static_cast<uint64_t>(i)));
    by_index.insert(SampleOnce(logits, params, 7, {}, std::vector<int32_t>(static_cast<size_t>(i), 0)));
    EXPECT_EQ(SampleOnce(logits, params, 9, {}, {1, 2}), SampleOnce(logits, params, 9, {}, {3, 4}));
  }
  EXPECT_GT(by_seed.size(), 20u);
  EXPECT_GT(by_index.size(), 20u);
}

TEST(SamplingParams, ErrorsKnowTheirField) {
  SamplingParams params;
  params.stop_token_ids = {100};
  try {
    params.Validate(100);
    FAIL() << "token 100 of 100";
  } catch (const InputError& error) {
    EXPECT_STREQ(error.Field(), "stop_token_ids");
  }
}

TEST(SamplingParams, RefusesWithNameValueAndRange) {
  const auto message = [](auto change) -> std::string {
    SamplingParams params;
    change(params);
    try {
      params.Validate(100);
    } catch (const InputError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message([](SamplingParams&) {}), "");
  EXPECT_EQ(message([](SamplingParams& p) { p.top_p = 0; }),
            "sampling parameter top_p = 0: must be above 0 and at most 1");
  EXPECT_NE(message([](SamplingParams& p) { p.temperature = NAN; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.temperature = -1; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.max_tokens = 0; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.min_tokens = 17; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.top_k = -2; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.min_p = 1.5F; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.repetition_penalty = 0; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.presence_penalty = 3; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.frequency_penalty = NAN; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.stop_token_ids = {100}; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.logit_bias = {{-1, 0.0F}}; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.logprobs = 101; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.logprobs = 0, p.logprob_token_ids = {100}; }), "");
  EXPECT_NE(message([](SamplingParams& p) { p.logprob_token_ids = {1}; }), "");
}

TEST(Mask, OnlyAllowedTokensAreSampled) {
  constexpr int kVocab = 77;  // the last word is not full
  SamplingParams params;
  Sampler sampler;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint32_t> mask(3);
    for (uint32_t& word : mask) word = static_cast<uint32_t>(random() & random() & random());
    mask[seed % 3] = seed % 2 == 0 ? 0U : ~0U;
    params.temperature = seed % 3 == 0 ? 0.0F : 1.0F;
    auto logits = RandomLogits(kVocab, seed);
    std::vector<int32_t> allowed;
    for (int32_t token = 0; token < kVocab; ++token) {
      if (Allows(mask, token)) allowed.push_back(token);
    }
    const auto best = std::ranges::max_element(allowed, {}, [&](int32_t t) { return logits[static_cast<size_t>(t)]; });
    const int32_t want = allowed.empty() ? Sampler::kNothingAllowed : *best;
    const int32_t got = sampler.Sample(logits, SamplerState(params, seed, {}, {}), mask);
    if (params.temperature == 0 || allowed.empty()) {
      EXPECT_EQ(got, want);
    } else {
      EXPECT_TRUE(Allows(mask, got)) << got;
    }
  }
}

TEST(Mask, BitsBeyondTheVocabularyAreIgnored) {
  auto logits = RandomLogits(40, 1);
  const std::vector<uint32_t> mask = {0, ~0U << 8};
  EXPECT_EQ(Sampler().Sample(logits, SamplerState(Greedy(), 1, {}, {}), mask), Sampler::kNothingAllowed);
}

TEST(Mask, AllowingEverythingChangesNothing) {
  const std::vector<uint32_t> all(4, ~0U);
  SamplingParams params;
  params.top_p = 0.9F;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    auto logits = RandomLogits(100, seed);
    auto same = logits;
    const SamplerState state(params, seed, {}, {});
    EXPECT_EQ(Sampler().Sample(logits, state, all), Sampler().Sample(same, state));
  }
}

TEST(Mask, StopTokensAreSampledBeforeMinTokensIfNothingElseIsAllowed) {
  SamplingParams params = Greedy();
  params.min_tokens = 5;
  params.max_tokens = 9;
  const SamplerState state(params, 1, {}, {7});
  std::vector<uint32_t> mask = {1U << 7};
  auto logits = RandomLogits(32, 2);
  EXPECT_EQ(Sampler().Sample(logits, state, mask), 7);
  mask[0] |= 1U << 9;
  logits = RandomLogits(32, 2);
  logits[7] = 100;
  EXPECT_EQ(Sampler().Sample(logits, state, mask), 9);
}

}  // namespace
}  // namespace kvanta::runner
