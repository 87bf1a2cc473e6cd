#include "scheduler/prompt_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "scheduler/scheduler_world.h"

namespace kvanta::scheduler {
namespace {

constexpr double kToken = 0.01;  // seconds

struct Prompts {
  explicit Prompts(const PromptOrderConfig& config = {}) : order(config) {}

  Sequence& Add(int64_t tokens, double now, std::string user = "") {
    auto sequence = world.Make(tokens);
    sequence->arrival = std::ssize(all);
    sequence->added = now;
    sequence->user = std::move(user);
    order.Add(*sequence);
    all.push_back(std::move(sequence));
    waiting.push_back(all.back().get());
    return *all.back();
  }
  // The one that comes first.
  Sequence& First(double now) {
    order.Begin(waiting, now, kToken);
    return **std::ranges::min_element(waiting, [&](auto* a, auto* b) { return order.Before(*a, *b); });
  }

  World world{Config(4, 64), 1 << 20};
  PromptOrder order;
  std::vector<std::unique_ptr<Sequence>> all;
  std::vector<Sequence*> waiting;
};

TEST(PromptOrder, TakesTheShortestFirst) {
  Prompts prompts;
  prompts.Add(1000, 0);
  Sequence& small = prompts.Add(40, 1);
  EXPECT_EQ(&prompts.First(1), &small);
}

TEST(PromptOrder, LeavesCachedTokensOut) {
  Prompts prompts;
  prompts.Add(100, 0);
  Sequence& cached = prompts.Add(1000, 0);
  cached.prefix_tokens = 960;
  EXPECT_EQ(&prompts.First(1), &cached);
}

TEST(PromptOrder, TakesPrioritiesBeforeLengths) {
  Prompts prompts;
  prompts.Add(40, 0);
  Sequence& urgent = prompts.Add(1000, 0);
  urgent.priority = -1;
  EXPECT_EQ(&prompts.First(1), &urgent);
}

TEST(PromptOrder, LetsNoPromptWaitForMoreThanMaxDelay) {
  Prompts prompts({.max_delay = 5});
  Sequence& large = prompts.Add(1000, 0);
  Sequence& small = prompts.Add(40, 4.5);
  EXPECT_EQ(&prompts.First(4.5), &small);
  EXPECT_EQ(&prompts.First(5.5), &large);
}

TEST(PromptOrder, TakesTheMostOverdueFirst) {
  Prompts prompts({.max_delay = 1});
  Sequence& small = prompts.Add(100, 0);
  prompts.Add(8000, 0.1);
  EXPECT_EQ(&prompts.First(1.5), &small);
}

TEST(PromptOrder, WaitsFourTimesThePromptsOwnTimeByDefault) {
  Prompts prompts;
  Sequence& large = prompts.Add(1000, 0);  // 10 s alone
  Sequence& small = prompts.Add(40, 38);
  EXPECT_EQ(&prompts.First(38), &small);
  prompts.waiting.pop_back();
  prompts.Add(40, 40.5);
  EXPECT_EQ(&prompts.First(40.5), &large);
}

TEST(PromptOrder, GivesTheOldestHalfOfTheTime) {
  Prompts prompts;
  Sequence& large = prompts.Add(100'000, 0);
  double of_large = 0, of_others = 0;
  for (int step = 0; step < 200; ++step) {
    prompts.Add(40, step * 0.1);
    Sequence& first = prompts.First(step * 0.1);
    prompts.order.Charge(first, 10, 0.1, true);
    (&first == &large ? of_large : of_others) += 0.1;
  }
  EXPECT_NEAR(of_large, of_others, 1);
}

TEST(PromptOrder, TakesPromptsAsTheyComeIfAsked) {
  Prompts prompts({.shortest_first = false});
  Sequence& first = prompts.Add(1000, 0);
  prompts.Add(40, 0);
  EXPECT_EQ(&prompts.First(0), &first);
}

TEST(PromptOrder, ServesUsersEqually) {
  Prompts prompts({.fair = true});
  for (int i = 0; i < 50; ++i) prompts.Add(100, 0, "many");
  for (int i = 0; i < 3; ++i) prompts.order.Charge(prompts.First(0), 100, 1, true);
  Sequence& single = prompts.Add(400, 1, "one");
  EXPECT_EQ(&prompts.First(1), prompts.all.front().get()) << "both have had as much, and the shorter one comes first";
  prompts.order.Charge(*prompts.all.front(), 100, 1, true);
  EXPECT_EQ(&prompts.First(1), &single);
  prompts.order.Charge(single, 60, 1, false);  // generated tokens count twice
  EXPECT_EQ(&prompts.First(1), prompts.all.front().get());
}

TEST(PromptOrder, KeepsNoUserWhoHasLeft) {
  Prompts prompts({.fair = true});
  Sequence& stays = prompts.Add(10, 0, "stays");
  for (int i = 0; i < 20'000; ++i) {
    Sequence& passes = prompts.Add(10, 0, "user " + std::to_string(i));
    prompts.order.Charge(passes, 1 + i % 7, 1, true);
    prompts.order.Remove(passes);
    prompts.all.pop_back();
    prompts.waiting.pop_back();
  }
  EXPECT_LE(prompts.order.Users(), 4097);
  EXPECT_EQ(&prompts.First(0), &stays);
}

}  // namespace
}  // namespace kvanta::scheduler
