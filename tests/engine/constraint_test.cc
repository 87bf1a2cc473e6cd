// Constrained requests: their tokens obey the mask, other requests keep their bits, errors end only their request.
#include "kvanta/constraint.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "engine/requests.h"

namespace kvanta::engine {
namespace {

// Token number n must be one of three that depend on n; after `length` tokens only `end` may follow, or nothing if it
// is negative.
struct Counting final : TokenConstraint {
  Counting(int requested, int32_t last) : length(requested), end(last) {}

  bool Allows(int position, int32_t token) const {
    return position < length ? token / 3 == 1 + position % 30 : token == end;
  }

  int length;
  int32_t end;
  int taken = 0;
  bool fails = false;
};

struct Asked {
  int calls = 0;
  size_t limit = 0;  // tasks of a call
  bool throws = false;
};

BitmaskFn Filler(Asked& asked) {
  return [&asked](std::span<MaskTask> tasks) {
    ++asked.calls;
    asked.limit = std::max(asked.limit, tasks.size());
    if (asked.throws) throw std::runtime_error("no language");
    for (MaskTask& task : tasks) {
      auto& state = dynamic_cast<Counting&>(*task.constraint);
      for (const int32_t token : task.taken) {
        EXPECT_TRUE(state.Allows(state.taken, token)) << "token " << token << " at " << state.taken;
        ++state.taken;
      }
      if (state.fails && state.taken == 2) {
        task.error = "no way on";
        task.invalid_input = true;
      }
      for (int32_t token = 0; token < 96; ++token) {
        if (state.Allows(state.taken, token)) task.mask[static_cast<size_t>(token / 32)] |= 1U << (token % 32);
      }
    }
  };
}

Request Constrained(std::string id, int length, int32_t end, SamplingParams params) {
  std::mt19937_64 random(length);
  return {.id = std::move(id),
          .prompt = RandomTokens(random, 20),
          .sampling = std::move(params),
          .constraint = std::make_shared<Counting>(length, end)};
}

void ExpectCounts(const std::vector<int32_t>& tokens, size_t length) {
  ASSERT_EQ(tokens.size(), length);
  for (size_t i = 0; i < length; ++i) EXPECT_EQ(tokens[i] / 3, 1 + static_cast<int32_t>(i) % 30);
}

TEST(Constraint, TokensObeyTheMaskAndItsEndEndsTheRequest) {
  Asked asked;
  EngineConfig config = TinyConfig(Model(), "int8");
  config.fill_masks = Filler(asked);
  Engine engine(config);
  SamplingParams params = Greedy(60);  // ignore_eos: a constraint's end ends all the same
  params.min_tokens = 40;              // and so before min_tokens
  auto result = RunOne(engine, Constrained("eos", 12, 2, params));
  EXPECT_EQ(result.finish, FinishReason::kStop);
  EXPECT_EQ(result.stop_token, 2);
  ASSERT_EQ(result.tokens.size(), 13u);
  result.tokens.pop_back();
  ExpectCounts(result.tokens, 12);
  EXPECT_EQ(asked.calls, 13);

  params.temperature = 1.5F;
  params.logprobs = 2;
  const auto nothing = RunOne(engine, Constrained("nothing", 9, -1, params));
  EXPECT_EQ(nothing.finish, FinishReason::kStop);
  EXPECT_FALSE(nothing.stop_token.has_value());
  EXPECT_EQ(nothing.logprobs.size(), 9u);
  ExpectCounts(nothing.tokens, 9);

  const auto cut = RunOne(engine, Constrained("cut", 100, 2, params));
  EXPECT_EQ(cut.finish, FinishReason::kLength);
  ExpectCounts(cut.tokens, 60);
  EXPECT_EQ(engine.Stats().finished_stop, 2);
  EXPECT_EQ(engine.Stats().finished_length, 1);
}

TEST(Constraint, OtherRequestsAreUnchangedAndFillMasksIsCalledOncePerStep) {
  Asked asked;
  EngineConfig config = TinyConfig(Model(), "int4");
  config.fill_masks = Filler(asked);
  config.kv_cache_memory_bytes = 60000;  // preempts
  Engine engine(config);
  Engine alone(TinyConfig(Model(), "int4"));
  std::mt19937_64 random(8);
  std::vector<Request> free;
  for (int i = 0; i < 6; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 30), .sampling = Greedy(50)};
    request.sampling.temperature = i % 2 == 0 ? 0.0F : 1.0F;
    request.sampling.logprobs = 1;
    free.push_back(request);
    engine.Add(request);
    engine.Add(Constrained("c" + std::to_string(i), 30 + i, 2, request.sampling));
  }
  const auto results = RunAll(engine);
  EXPECT_GT(engine.Stats().preemptions, 0);
  EXPECT_GT(asked.limit, 1u);
  EXPECT_LE(asked.calls, engine.Stats().steps);
  for (int i = 0; i < 6; ++i) {
    const Collected want = RunOne(alone, free[static_cast<size_t>(i)]);
    const Collected& got = results.at(std::to_string(i));
    EXPECT_EQ(got.tokens, want.tokens);
    for (size_t token = 0; token < got.logprobs.size(); ++token) {
      EXPECT_EQ(got.logprobs[token][0].logprob, want.logprobs[token][0].logprob);
    }
    auto tokens = results.at("c" + std::to_string(i)).tokens;
    EXPECT_EQ(tokens.back(), 2);
    tokens.pop_back();
    ExpectCounts(tokens, static_cast<size_t>(30 + i));
  }
}

TEST(Constraint, ErrorsEndOnlyTheirRequest) {
  Asked asked;
  EngineConfig config = TinyConfig(Model(), "int8");
  config.fill_masks = Filler(asked);
  Engine engine(config);
  Request bad = Constrained("bad", 10, 2, Greedy(20));
  dynamic_cast<Counting&>(*bad.constraint).fails = true;
  engine.Add(bad);
  engine.Add(Constrained("good", 10, 2, Greedy(20)));
  engine.Add({.id = "free", .prompt = {1, 2}, .sampling = Greedy(15)});
  auto results = RunAll(engine);
  EXPECT_EQ(results["bad"].finish, FinishReason::kError);
  EXPECT_EQ(results["bad"].error, "no way on");
  EXPECT_TRUE(results["bad"].invalid_input);
  EXPECT_EQ(results["bad"].tokens.size(), 2u);
  EXPECT_EQ(results["good"].finish, FinishReason::kStop);
  EXPECT_EQ(results["free"].tokens.size(), 15u);

  asked.throws = true;
  engine.Add(Constrained("good", 10, 2, Greedy(20)));
  engine.Add({.id = "free", .prompt = {1, 2}, .sampling = Greedy(15)});
  results = RunAll(engine);
  EXPECT_EQ(results["good"].error, "the constraint failed: no language");
  EXPECT_FALSE(results["good"].invalid_input) << "a fault of the program";
  EXPECT_EQ(results["free"].tokens.size(), 15u);
  EXPECT_EQ(engine.Stats().running, 0);
}

TEST(Constraint, NeedsFillMasks) {
  Engine engine(TinyConfig(Model(), "int8"));
  EXPECT_THROW(engine.Add(Constrained("a", 3, 2, Greedy(5))), InputError);
}

}  // namespace
}  // namespace kvanta::engine
