// Steps by time: how much of which prompt is computed, for a machine whose time is known.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "scheduler/scheduler_world.h"

namespace kvanta::scheduler {
namespace {

constexpr double kStep = 0.02, kRow = 0.002;  // seconds of a step, and of each row

// A world with a clock, on which a step takes kStep + kRow per row.
struct TimedWorld : World {
  explicit TimedWorld(const SchedulerConfig& config, int64_t budget = 1 << 24, bool prefix = false, bool floor = false)
      : World(config, budget, false, 0, prefix, floor) {
    Learn();
  }

  // Teaches the scheduler what steps take.
  void Learn() {
    for (int turn = 0; turn < 5; ++turn) {
      for (const int64_t rows : {1, 4, 16, 64, 256, 512}) {
        for (const int64_t start : {0, 500}) {
          StepWork work;
          scheduler.TimeModel().Add(work, start, rows, 0);
          scheduler.TimeModel().Record(work, Seconds(rows));
        }
      }
    }
  }
  static double Seconds(int64_t rows) { return kStep + kRow * static_cast<double>(rows); }

  // Runs a step, gives every sequence whose last token it had another one, and returns its seconds.
  double Step() {
    const auto chunks = scheduler.Schedule(StepClock{.now = now, .spent = spent});
    int64_t rows = 0;
    StepWork work;
    std::vector<Sequence*> sampled;
    tokens.clear();
    for (const Chunk& chunk : chunks) {
      rows += chunk.tokens;
      scheduler.TimeModel().Add(work, chunk.start, chunk.tokens, chunk.last ? 1 : 0);
      if (chunk.last) sampled.push_back(chunk.sequence);
      tokens.emplace_back(chunk.sequence, chunk.tokens);
    }
    scheduler.Commit();
    for (Sequence* sequence : sampled) sequence->tokens.push_back(7);
    if (rows == 0) return 0;
    now += Seconds(rows);
    scheduler.TimeModel().Record(work, Seconds(rows));
    return Seconds(rows);
  }
  int TokensOf(const Sequence& sequence) const {
    const auto chunk = std::ranges::find(tokens, &sequence, &std::pair<Sequence*, int>::first);
    return chunk == tokens.end() ? 0 : chunk->second;
  }
  std::unique_ptr<Sequence> Add(int64_t length, int32_t value = 3, std::string user = "") {
    auto sequence = Make(length, value);
    sequence->added = now;
    sequence->user = std::move(user);
    scheduler.Add(*sequence);
    return sequence;
  }

  double now = 100, spent = 0;
  std::vector<std::pair<Sequence*, int>> tokens;  // tokens of the last step
};

TEST(StepTime, StreamsDoNotWaitForPrompts) {
  TimedWorld world(Config(8, 512));
  auto stream = world.Add(5);
  world.Step();
  auto prompt = world.Add(4000, 4);
  int steps = 0;
  for (; prompt->Remaining() > 1 && prompt->tokens.size() == 4000; ++steps) {
    const double seconds = world.Step();
    EXPECT_LE(seconds, kStep + kRow + 0.04 * 1.15) << "40 ms for prompts";
    EXPECT_EQ(world.TokensOf(*stream), 1);
    EXPECT_GE(world.TokensOf(*prompt), std::min<int64_t>(8, 4000 - 8));
  }
  EXPECT_LE(steps, 4000 / 14) << "the time is used";
}

TEST(StepTime, StepsAreLongerWhereManyPromptsWait) {
  TimedWorld world(Config(64, 512));
  auto stream = world.Add(5);
  world.Step();
  std::vector<std::unique_ptr<Sequence>> prompts;
  for (int i = 0; i < 30; ++i) prompts.push_back(world.Add(1000, i));
  const double seconds = world.Step();
  EXPECT_GE(seconds, 0.2);
  EXPECT_LE(seconds, kStep + kRow + 6 * 0.04 * 1.15);
}

TEST(StepTime, AGivenLimitHolds) {
  SchedulerConfig config = Config(8, 512);
  config.max_step_seconds = 0.15;
  TimedWorld world(config);
  auto stream = world.Add(5);
  world.Step();
  auto prompt = world.Add(2000, 4);
  const double seconds = world.Step();
  EXPECT_GE(seconds, 0.1);
  EXPECT_LE(seconds, 0.15 * 1.15);
  world.spent = 0.05;  // on loads of pages, say
  EXPECT_LE(world.Step(), 0.1 * 1.15);
}

// Demotions are done while a step is scheduled, in the time of its prompts.
TEST(StepTime, DemotionsTakeTheTimeOfPrompts) {
  // Prompts in the step of the first demotion.
  const auto prompts_of_step = [](double seconds_of_page) {
    TimedWorld world(Config(32, 512), 100 * 1024, /*prefix=*/false, /*floor=*/true);
    int pages = 0;
    world.cache.encode_levels = [&](int, const uint8_t*, std::span<uint8_t* const>) {
      world.cache.demotion_seconds += seconds_of_page;
      ++pages;
    };
    auto stream = world.Add(90 * kPage);
    while (stream->tokens.size() == 90 * kPage) world.Step();
    EXPECT_EQ(pages, 0);
    std::vector<std::unique_ptr<Sequence>> prompts;
    for (int i = 0; i < 20; ++i) prompts.push_back(world.Add(4, i));
    while (pages == 0) world.Step();
    EXPECT_EQ(world.TokensOf(*stream), 1);
    return std::ranges::count_if(prompts, [&](const auto& prompt) { return world.TokensOf(*prompt) == 4; });
  };
  const auto all = prompts_of_step(0), fewer = prompts_of_step(1);
  EXPECT_GT(fewer, 0);
  EXPECT_GT(all, fewer + 2);
}

TEST(StepTime, WithoutStreamsStepsAreLongerButNotEndless) {
  TimedWorld world(Config(8, 512));
  auto prompt = world.Add(8000);
  const double seconds = world.Step();
  EXPECT_GE(seconds, 0.3);
  EXPECT_LE(seconds, 0.4 * 1.15);
}

TEST(StepTime, AShortPromptPassesALongOne) {
  TimedWorld world(Config(8, 512));
  auto large = world.Add(8000);
  world.Step();
  auto small = world.Add(40, 4);
  const double seconds = world.Step();
  EXPECT_EQ(world.TokensOf(*small), 40) << "at once";
  EXPECT_LE(seconds, 0.15) << "its first token does not wait for the other's chunk";
}

TEST(StepTime, PromptsThatKeepComingDoNotStarveALongOne) {
  TimedWorld world(Config(64, 512));
  auto large = world.Add(8000);
  const double alone = 8000 * kRow;
  std::vector<std::unique_ptr<Sequence>> others;
  const double begin = world.now;
  while (large->tokens.size() == 8000) {
    while (std::ssize(others) < static_cast<int64_t>((world.now - begin) / 0.1)) {  // all of the machine's time
      others.push_back(world.Add(50, static_cast<int32_t>(others.size() % 100)));
    }
    world.Step();
    for (auto& other : others) {
      if (other && other->tokens.size() > 50) {
        world.scheduler.Remove(*other);
        other.reset();
      }
    }
    ASSERT_LT(world.now - begin, 10 * alone);
  }
  EXPECT_LE(world.now - begin, 2.5 * alone);
}

TEST(StepTime, UsersShareThePrompts) {
  SchedulerConfig config = Config(64, 512);
  config.prompts.fair = true;
  TimedWorld world(config);
  std::vector<std::unique_ptr<Sequence>> many;
  for (int i = 0; i < 50; ++i) many.push_back(world.Add(200, i, "many"));
  for (int step = 0; step < 3; ++step) world.Step();
  auto single = world.Add(200, 99, "one");
  const double begin = world.now;
  while (single->tokens.size() == 200) world.Step();
  EXPECT_LE(world.now - begin, 3 * TimedWorld::Seconds(200));
}

TEST(StepTime, UsersPayForAcceptedDrafts) {
  SchedulerConfig config = Config(64, 512);
  config.prompts.fair = true;
  TimedWorld world(config);
  auto a = world.Add(5, 3, "a"), b = world.Add(5, 4, "b");
  world.Step();
  world.scheduler.ChargeDrafts(*a, 50);
  auto of_a = world.Add(3000, 5, "a"), of_b = world.Add(3000, 6, "b");
  world.Step();
  EXPECT_EQ(world.TokensOf(*of_a), 0);
  EXPECT_GT(world.TokensOf(*of_b), 0);
}

// The work of a step must not grow with the square of the prompts that wait.
TEST(StepTime, ThousandsMayWait) {
  TimedWorld world(Config(4, 512));
  std::vector<std::unique_ptr<Sequence>> prompts;
  for (int i = 0; i < 20'000; ++i) prompts.push_back(world.Add(300, i % 1000));
  for (int step = 0; step < 20; ++step) EXPECT_GT(world.Step(), 0);
}

TEST(StepTime, LimitsOfPartialPromptsHold) {
  SchedulerConfig config = Config(8, 512);
  config.max_partial_prompts = 2;
  config.long_prompt_tokens = 100;
  config.max_long_partial_prompts = 1;
  TimedWorld world(config);
  auto large = world.Add(4000), larger = world.Add(5000, 4), small = world.Add(90, 5);
  for (int step = 0; step < 4; ++step) {
    world.Step();
    EXPECT_LE(world.TokensOf(*large), 100);
    EXPECT_EQ(world.TokensOf(*larger), 0);
  }
  EXPECT_GT(small->tokens.size(), 90u);
}

// Nothing is known before the first step; the next ones may have a few times as many rows as any before.
TEST(StepTime, RowsGrowFromStepToStep) {
  World world(Config(8, 512), 1 << 24, false, 0, false);
  auto prompt = world.Make(4000);
  world.scheduler.Add(*prompt);
  int64_t rows = 4;
  for (int step = 0; step < 4; ++step) {
    const auto chunks = world.scheduler.Schedule(StepClock{});
    ASSERT_EQ(chunks.size(), 1u);
    EXPECT_LE(chunks[0].tokens, 4 * rows);
    EXPECT_GE(chunks[0].tokens, std::min<int64_t>(512, 4 * rows) / 2);
    rows = chunks[0].tokens;
    StepWork work;
    world.scheduler.TimeModel().Add(work, chunks[0].start, chunks[0].tokens, 0);
    world.scheduler.Commit();
    world.scheduler.TimeModel().Record(work, 1e-5 * static_cast<double>(chunks[0].tokens));
  }
}

TEST(StepTime, EveryoneFinishesUnderRandomTraffic) {
  int64_t preemptions = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t limit = 8 * kPage;
    SchedulerConfig config = Config(static_cast<int>(random() % 8 + 1), static_cast<int>(random() % 100 + kPage));
    config.max_step_seconds = std::vector{0.0, 0.001, 0.05, 1.0}[random() % 4];
    config.prompts = {.shortest_first = random() % 4 != 0, .max_delay = random() % 2 * 0.5, .fair = random() % 2 == 0};
    config.max_partial_prompts = static_cast<int>(random() % 3);
    config.long_prompt_tokens = static_cast<int64_t>(random() % 2 * 3 * kPage);
    config.max_long_partial_prompts = static_cast<int>(random() % 2);
    config.steps_in_flight = 1;
    World probe(config, 1 << 20, false, 0);
    const int64_t budget = probe.cache.spec.MaxBytes(limit) + static_cast<int64_t>(random() % 20000);
    TimedWorld world(config, budget, seed % 3 != 0);
    std::vector<std::pair<std::unique_ptr<Sequence>, size_t>> live;  // and its last length
    int added = 0;
    for (int steps = 0; added < 40 || !live.empty(); ++steps) {
      ASSERT_LT(steps, 20000) << "no progress, seed " << seed;
      if (added < 40 && random() % 3 == 0) {
        const auto goal = static_cast<int64_t>(random() % limit + 1);
        live.emplace_back(world.Add(static_cast<int64_t>(random() % goal + 1), static_cast<int32_t>(random() % 2),
                                    std::to_string(random() % 3)),
                          goal);
        ++added;
      }
      const bool is_idle = live.empty();
      const double seconds = world.Step();
      ASSERT_TRUE(is_idle || seconds > 0) << "a step with work computed nothing, seed " << seed;
      ASSERT_TRUE(world.scheduler.Unschedulable().empty());
      ASSERT_LE(world.cache.pool.UsedBytes(), budget);
      std::erase_if(live, [&](const auto& each) {
        if (each.first->tokens.size() <= each.second && random() % 300 != 0) return false;
        world.scheduler.Remove(*each.first);
        return true;
      });
    }
    if (world.cache.prefix) world.cache.prefix->Clear();
    EXPECT_EQ(world.cache.pool.UsedBytes(), 0);
    preemptions += world.scheduler.Preemptions();
  }
  EXPECT_GT(preemptions, 50);
}

}  // namespace
}  // namespace kvanta::scheduler
