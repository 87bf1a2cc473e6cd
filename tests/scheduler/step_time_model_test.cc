#include "scheduler/step_time_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "scheduler/scheduler_world.h"

namespace kvanta::scheduler {
namespace {

// A machine: weights are read once in a step, and rows beyond some are bound by arithmetic. A caller adds noise.
struct Machine {
  double weights = 0.04, row = 0.003, pair = 2e-7, load = 1e-6, logit = 0.0005;

  double Seconds(const StepWork& work) const {
    return std::max(weights, 0.6 * weights + row * work.rows) + pair * work.pairs + load * work.loads +
           logit * work.logits;
  }
};

cache::KvCacheSpec Spec(std::vector<cache::Visibility> layers = {}) {
  formats::CacheLayout layout = Layout(false, 0);
  while (layout.layers.size() < layers.size()) {
    layout.layers.push_back(layout.layers.front());
    layout.layers.back().group = static_cast<int>(layout.groups.size());
    layout.groups.push_back(layout.groups.front());
  }
  return cache::KvCacheSpec(layout, layers);
}

StepWork Work(const StepTimeModel& cost, int64_t decodes, int64_t context, int64_t prompt, int64_t start) {
  StepWork work;
  for (int64_t i = 0; i < decodes; ++i) cost.Add(work, context, 1, 1);
  if (prompt > 0) cost.Add(work, start, prompt, 0);
  return work;
}

// A step as a server has them: some sequences decode, and most often there is a part of a prompt.
StepWork RandomWork(const StepTimeModel& cost, std::mt19937_64& random) {
  const auto decodes = static_cast<int64_t>(random() % 8);
  const int64_t prompt = decodes > 0 && random() % 3 == 0 ? 0 : int64_t{8} << random() % 6;
  return Work(cost, decodes, static_cast<int64_t>(random() % 4000), prompt, static_cast<int64_t>(random() % 8000));
}

// Share of `steps` steps that were predicted within 15 %, after 50 others.
double ShareWithin(StepTimeModel& cost, const Machine& machine, std::mt19937_64& random, int steps) {
  std::normal_distribution<double> noise(1, 0.03);
  int good = 0;
  for (int step = -50; step < steps; ++step) {
    const StepWork work = RandomWork(cost, random);
    const double seconds = machine.Seconds(work) * noise(random), expected = cost.Seconds(work);
    if (step >= 0 && std::abs(expected - seconds) <= 0.15 * seconds) ++good;
    cost.Record(work, seconds);
  }
  return static_cast<double>(good) / steps;
}

TEST(StepTimeModel, CountsTheWorkOfASequence) {
  StepTimeModel cost(Spec());
  StepWork work;
  cost.Add(work, 100, 3, 1);
  EXPECT_EQ(work.rows, 3);
  EXPECT_EQ(work.logits, 1);
  EXPECT_EQ(work.loads, 103);
  EXPECT_EQ(work.pairs, 101 + 102 + 103);
}

TEST(StepTimeModel, CountsWhatAWindowShows) {
  StepTimeModel cost(Spec({cache::SlidingWindow(10), {}}));  // two groups, which count half each
  StepWork work;
  cost.Add(work, 8, 4, 0);
  EXPECT_EQ(work.pairs, 0.5 * (9 + 10 + 10 + 10) + 0.5 * (9 + 10 + 11 + 12));
  EXPECT_EQ(work.loads, 12);
  work = {};
  cost.Add(work, 1000, 4, 0);
  EXPECT_EQ(work.loads, 0.5 * 14 + 0.5 * 1004);
}

TEST(StepTimeModel, PredictsNothingBeforeAStep) {
  StepTimeModel cost(Spec());
  EXPECT_EQ(cost.Seconds(Work(cost, 1, 10, 0, 0)), 0);
  EXPECT_EQ(cost.MeasuredRows(), 0);
}

TEST(StepTimeModel, LearnsAMachine) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    StepTimeModel cost(Spec());
    EXPECT_GE(ShareWithin(cost, Machine(), random, 300), 0.95) << seed;
  }
}

TEST(StepTimeModel, FollowsAMachineThatBecomesSlower) {
  std::mt19937_64 random(1);
  StepTimeModel cost(Spec());
  EXPECT_GE(ShareWithin(cost, Machine(), random, 300), 0.95);
  const Machine slow{.weights = 0.08, .row = 0.006, .pair = 4e-7, .load = 2e-6, .logit = 0.001};
  EXPECT_GE(ShareWithin(cost, slow, random, 300), 0.95);
}

// The process was stopped for a minute in a step, early or late: it says nothing about the steps to come.
TEST(StepTimeModel, ForgetsAStall) {
  for (const int before : {60, 400}) {
    std::mt19937_64 random(2);
    StepTimeModel cost(Spec());
    const Machine machine;
    for (int step = 0; step < before; ++step) {
      const StepWork work = RandomWork(cost, random);
      cost.Record(work, machine.Seconds(work));
    }
    const StepWork stalled = RandomWork(cost, random);
    cost.Record(stalled, machine.Seconds(stalled) + 60);
    for (int step = 0; step < 20; ++step) {
      const StepWork work = RandomWork(cost, random);
      cost.Record(work, machine.Seconds(work));
    }
    int good = 0;
    for (int step = 0; step < 100; ++step) {
      const StepWork work = RandomWork(cost, random);
      const double seconds = machine.Seconds(work);
      if (std::abs(cost.Seconds(work) - seconds) <= 0.15 * seconds) ++good;
      cost.Record(work, seconds);
    }
    EXPECT_GE(good, 95) << before;
  }
}

// Steps of few rows say nothing about those of hundreds; these must not seem to be free.
TEST(StepTimeModel, NeverPredictsRowsThatAreNearlyFree) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> noise(1, 0.1);
  StepTimeModel cost(Spec());
  const Machine machine;
  const auto record = [&](int64_t decodes, int64_t prompt) {
    const StepWork work = Work(cost, decodes, static_cast<int64_t>(random() % 4000), prompt, 0);
    cost.Record(work, machine.Seconds(work) * noise(random));
  };
  for (const int64_t rows : {16, 64, 256, 512}) record(0, rows);
  for (int step = 0; step < 5000; ++step) record(4, 12 + static_cast<int64_t>(random() % 16));
  for (const int64_t rows : {64, 128, 512}) {
    const StepWork work = Work(cost, 4, 2000, rows, 0);
    EXPECT_GE(cost.Seconds(work), 0.5 * machine.Seconds(work)) << rows;
  }
}

}  // namespace
}  // namespace kvanta::scheduler
