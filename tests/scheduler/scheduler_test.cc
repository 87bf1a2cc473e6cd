#include "scheduler/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "kvanta/error.h"
#include "scheduler/scheduler_world.h"

namespace kvanta::scheduler {
namespace {

TEST(Scheduler, RefusesABudgetBelowAPage) {
  EXPECT_THROW(World(Config(4, kPage - 1), 1 << 20), InputError);
  EXPECT_THROW(World(Config(0, kPage), 1 << 20), InputError);
}

TEST(Scheduler, LoadingSequencesLetOthersPass) {
  World world(Config(2, 64), 1 << 20);
  auto first = world.Make(20);
  auto second = world.Make(20, 4);
  first->loading = true;
  world.scheduler.Add(*first);
  EXPECT_TRUE(world.scheduler.Schedule().empty());
  EXPECT_TRUE(world.scheduler.Unschedulable().empty());
  world.scheduler.Add(*second);
  auto chunks = world.scheduler.Schedule();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, second.get());
  world.scheduler.Commit();
  first->loading = false;
  second->tokens.push_back(5);
  chunks = world.scheduler.Schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[1].sequence, first.get());
  world.scheduler.Commit();
}

TEST(Scheduler, ChunksEndOnPageBoundariesExceptTheLast) {
  World world(Config(4, 40), 1 << 20);
  auto sequence = world.Make(100);
  world.scheduler.Add(*sequence);
  std::vector<int> sizes;
  while (sequence->Remaining() > 0) {
    const auto chunks = world.scheduler.Schedule();
    ASSERT_EQ(chunks.size(), 1u);
    EXPECT_EQ(chunks[0].last, chunks[0].start + chunks[0].tokens == 100);
    sizes.push_back(chunks[0].tokens);
    world.scheduler.Commit();
  }
  EXPECT_EQ(sizes, (std::vector<int>{32, 32, 36}));
}

TEST(Scheduler, WholeSequencesAreComputedInOneStep) {
  SchedulerConfig config = Config(4, 5 * kPage);
  config.whole_sequences = true;
  config.long_prompt_tokens = kPage;
  World world(config, 9 * 1024, false, 0);
  auto first = world.Make(4 * kPage + 3, 1), second = world.Make(2 * kPage, 2), third = world.Make(kPage, 3);
  for (Sequence* sequence : {first.get(), second.get(), third.get()}) world.scheduler.Add(*sequence);
  const auto step = [&] {
    std::vector<Sequence*> computed;
    for (const Chunk& chunk : world.scheduler.Schedule(StepClock{})) {
      EXPECT_EQ(chunk.start, 0);
      EXPECT_EQ(chunk.tokens, std::ssize(chunk.sequence->tokens));
      EXPECT_TRUE(chunk.last);
      computed.push_back(chunk.sequence);
    }
    world.scheduler.Commit();
    for (Sequence* sequence : computed) world.scheduler.Remove(*sequence);
    return computed;
  };
  EXPECT_EQ(step(), (std::vector<Sequence*>{third.get(), second.get()})) << "the budget has no place for the longest";
  EXPECT_EQ(step(), std::vector<Sequence*>{first.get()});
}

TEST(Scheduler, DraftsLeaveThePageOpen) {
  World world(Config(4, 40), 1 << 20);
  for (int64_t length = 1; length <= 2 * kPage; ++length) {
    auto sequence = world.Make(length);
    world.scheduler.Add(*sequence);
    while (sequence->Remaining() > 0) {
      const Chunk chunk = world.scheduler.Schedule().front();
      const int64_t slots = world.scheduler.DraftSlots(chunk);
      const int64_t end = chunk.start + chunk.tokens;
      EXPECT_EQ(slots, end % kPage == 0 ? 0 : kPage - 1 - end % kPage) << end;
      EXPECT_EQ(world.scheduler.BudgetLeft(), 40 - chunk.tokens);
      world.scheduler.Commit();
      if (sequence->Remaining() > 0) continue;
      sequence->tokens.resize(static_cast<size_t>(end + slots), 3);
      sequence->pages.Extend(slots);
      EXPECT_EQ(sequence->pages.Length(), end + slots);
    }
    world.scheduler.Remove(*sequence);
  }
}

TEST(Scheduler, DecodesGoBeforePrompts) {
  World world(Config(4, 2 * kPage), 1 << 20, false, 0);
  auto first = world.Make(5, 1);
  auto second = world.Make(100, 2);
  world.scheduler.Add(*first);
  world.scheduler.Schedule();
  world.scheduler.Commit();
  first->tokens.push_back(9);
  world.scheduler.Add(*second);
  const auto chunks = world.scheduler.Schedule();
  ASSERT_EQ(chunks.size(), 2u);
  EXPECT_EQ(chunks[0].sequence, first.get());
  EXPECT_EQ(chunks[0].tokens, 1);
  EXPECT_EQ(chunks[1].tokens, kPage) << "31 tokens of budget are one whole page";
}

// With a budget of one page, decoding sequences leave less than a page: prefill still advances.
TEST(Scheduler, DecodesDoNotStarvePrompts) {
  for (const int budget : {kPage, kPage + 1, 2 * kPage}) {
    World world(Config(4, budget), 1 << 20, false, 0);
    auto decoding = world.Make(5, 1), prompt = world.Make(40, 2), next = world.Make(40, 3);
    world.scheduler.Add(*decoding);
    world.scheduler.Schedule();
    world.scheduler.Commit();
    world.scheduler.Add(*prompt);
    world.scheduler.Add(*next);
    for (int step = 0; step < 8; ++step) {
      if (decoding->Remaining() == 0) decoding->tokens.push_back(9);
      world.scheduler.Schedule();
      world.scheduler.Commit();
    }
    EXPECT_EQ(prompt->Remaining(), 0) << "budget " << budget;
    EXPECT_EQ(next->Remaining(), 0) << "budget " << budget;
    EXPECT_EQ(decoding->tokens.size(), 13u) << "a decode was skipped";
  }
}

// A full cache: the first waiting sequence is tried again only after the state has improved.
TEST(Scheduler, ABlockedAdmissionIsTriedAgainWhenASequenceEnds) {
  World world(Config(4, 64), 6 * 1024, false, 0);
  auto first = world.Make(3 * kPage, 1), second = world.Make(2 * kPage, 2), third = world.Make(3 * kPage, 3);
  for (Sequence* sequence : {first.get(), second.get()}) {
    world.scheduler.Add(*sequence);
    world.scheduler.Schedule();
    world.scheduler.Commit();
  }
  world.scheduler.Add(*third);
  for (int step = 0; step < 5; ++step) EXPECT_TRUE(world.scheduler.Schedule().empty());
  EXPECT_EQ(world.scheduler.Waiting(), 1);
  world.scheduler.Remove(*first);
  ASSERT_EQ(world.scheduler.Schedule().size(), 1u);
  world.scheduler.Commit();
  EXPECT_EQ(world.scheduler.Waiting(), 0);
}

// A new sequence may have the address of the blocked one that was removed.
TEST(Scheduler, ABlockedSequenceThatIsRemovedDoesNotBlockTheNext) {
  World world(Config(4, 64), 9 * 1024, false, 0);
  auto first = world.Make(3 * kPage, 1), second = world.Make(2 * kPage, 2), third = world.Make(3 * kPage, 3);
  for (Sequence* sequence : {first.get(), second.get()}) {
    world.scheduler.Add(*sequence);
    world.scheduler.Schedule();
    world.scheduler.Commit();
  }
  world.scheduler.Add(*third);
  EXPECT_TRUE(world.scheduler.Schedule().empty());
  world.scheduler.Remove(*third);
  third->tokens.resize(kPage);
  world.scheduler.Add(*third);
  EXPECT_EQ(world.scheduler.Schedule().size(), 1u);
}

TEST(Scheduler, ServesByPriorityThenArrival) {
  World world(Config(1, 64), 1 << 20);
  auto late = world.Make(3, 1);
  auto urgent = world.Make(3, 2);
  auto last = world.Make(3, 3);
  late->priority = 5;
  last->priority = 5;
  world.scheduler.Add(*late);
  world.scheduler.Add(*last);
  world.scheduler.Add(*urgent);
  std::vector<Sequence*> order;
  for (int i = 0; i < 3; ++i) {
    order.push_back(world.scheduler.Schedule()[0].sequence);
    world.scheduler.Commit();
    world.scheduler.Remove(*order.back());
  }
  EXPECT_EQ(order, (std::vector<Sequence*>{urgent.get(), late.get(), last.get()}));
}

TEST(Scheduler, PreemptsTheLastInLineAndNeverTheFirst) {
  World world(Config(4, 64), 6 * 1024, false, 0, false);
  auto first = world.Make(2 * kPage, 1);
  auto second = world.Make(2 * kPage, 2);
  world.scheduler.Add(*first);
  world.scheduler.Add(*second);
  for (int i = 0; i < 3 * kPage; ++i) {
    world.scheduler.Schedule();
    world.scheduler.Commit();
    for (Sequence* sequence : {first.get(), second.get()}) {
      if (sequence->Remaining() == 0) sequence->tokens.push_back(7);
    }
  }
  EXPECT_EQ(first->preemptions, 0);
  EXPECT_GT(second->preemptions, 0);
  EXPECT_EQ(world.scheduler.Preemptions(), second->preemptions);
}

TEST(Scheduler, PreemptsWhatIsCheapestToBringBack) {
  World world(Config(4, 256), 9 * 1024, false, 0, false);
  auto first = world.Make(kPage, 1), cheap = world.Make(kPage, 2), large = world.Make(3 * kPage, 3);
  for (Sequence* sequence : {first.get(), cheap.get(), large.get()}) world.scheduler.Add(*sequence);
  while (world.scheduler.Preemptions() == 0) {
    ASSERT_FALSE(world.scheduler.Schedule().empty());
    world.scheduler.Commit();
    if (first->Remaining() == 0) first->tokens.push_back(7);  // it alone grows
  }
  EXPECT_EQ(cheap->preemptions, 1) << "the last one has three times as many tokens";
  EXPECT_EQ(large->preemptions, 0);
}

TEST(Scheduler, HandsBackWhatCanNeverFit) {
  World world(Config(4, 64), 4 * 1024 + 3072);
  auto sequence = world.Make(100 * kPage);
  world.scheduler.Add(*sequence);
  EXPECT_TRUE(world.scheduler.Schedule().empty());
  ASSERT_EQ(world.scheduler.Unschedulable().size(), 1u);
  EXPECT_EQ(world.scheduler.Unschedulable()[0], sequence.get());
  EXPECT_EQ(world.cache.pool.UsedBytes(), 0);
  EXPECT_EQ(world.scheduler.Waiting(), 0);
}

TEST(Scheduler, RemoveFreesPagesAtOnce) {
  World world(Config(4, 64), 1 << 20, true, 1, false);
  auto sequence = world.Make(40);
  world.scheduler.Add(*sequence);
  world.scheduler.Schedule();
  world.scheduler.Commit();
  EXPECT_GT(world.cache.pool.UsedBytes(), 0);
  world.scheduler.Remove(*sequence);
  EXPECT_EQ(world.cache.pool.UsedBytes(), 0);
  EXPECT_EQ(world.scheduler.Running(), 0);
}

TEST(Scheduler, EveryoneFinishesUnderRandomTraffic) {
  int64_t preemptions = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const bool exact = seed % 2 == 0;
    const int64_t limit = 8 * kPage;
    const SchedulerConfig config = Config(static_cast<int>(random() % 8 + 1), static_cast<int>(random() % 100 + kPage));
    World probe(config, 1 << 20, exact, seed % 4 == 0);
    const int64_t budget = probe.cache.spec.MaxBytes(limit) + static_cast<int64_t>(random() % 20000);
    World world(config, budget, exact, seed % 4 == 0, seed % 3 != 0);
    struct Live {
      std::unique_ptr<Sequence> sequence;
      int64_t goal;
    };
    std::vector<Live> live;
    int added = 0;
    int finished = 0;
    int steps = 0;
    while (added < 40 || !live.empty()) {
      ASSERT_LT(++steps, 20000) << "no progress, seed " << seed;
      if (added < 40 && random() % 3 == 0) {
        const auto goal = static_cast<int64_t>(random() % limit + 1);
        Live fresh{world.Make(static_cast<int64_t>(random() % goal + 1), static_cast<int32_t>(random() % 2)), goal};
        fresh.sequence->priority = static_cast<int>(random() % 2);
        world.scheduler.Add(*fresh.sequence);
        live.push_back(std::move(fresh));
        ++added;
      }
      const auto chunks = world.scheduler.Schedule();
      ASSERT_TRUE(world.scheduler.Unschedulable().empty());
      int tokens = 0;
      std::map<Sequence*, int> seen;
      for (const Chunk& chunk : chunks) {
        tokens += chunk.tokens;
        ASSERT_EQ(++seen[chunk.sequence], 1);
        ASSERT_GE(chunk.tokens, 1);
        ASSERT_EQ(chunk.sequence->pages.Reserved(), chunk.tokens);
        ASSERT_EQ(chunk.start, chunk.sequence->pages.Length());
        const int64_t end = chunk.start + chunk.tokens;
        ASSERT_EQ(chunk.last, end == static_cast<int64_t>(chunk.sequence->tokens.size()));
        // Only a step's first prompt may end inside a page, if less than two pages of the budget are left.
        const bool aligned = chunk.last || end % kPage == 0;
        ASSERT_TRUE(aligned || (chunk.tokens < 2 * kPage && tokens == config.max_step_tokens));
      }
      ASSERT_LE(tokens, config.max_step_tokens);
      ASSERT_LE(world.scheduler.Running(), config.max_sequences);
      ASSERT_LE(world.cache.pool.UsedBytes(), budget);
      ASSERT_TRUE(live.empty() || !chunks.empty()) << "a step with work computed nothing, seed " << seed;
      std::vector<Sequence*> sampled;
      for (const Chunk& chunk : chunks) {
        if (chunk.last) sampled.push_back(chunk.sequence);
      }
      world.scheduler.Commit();
      for (Sequence* sequence : sampled) sequence->tokens.push_back(static_cast<int32_t>(random() % 2));
      for (auto it = live.begin(); it != live.end();) {
        if (static_cast<int64_t>(it->sequence->tokens.size()) > it->goal || random() % 300 == 0) {
          world.scheduler.Remove(*it->sequence);
          it = live.erase(it);
          ++finished;
        } else {
          ++it;
        }
      }
    }
    EXPECT_EQ(finished, 40);
    if (world.cache.prefix) world.cache.prefix->Clear();
    EXPECT_EQ(world.cache.pool.UsedBytes(), 0);
    preemptions += world.scheduler.Preemptions();
  }
  EXPECT_GT(preemptions, 100);
}

}  // namespace
}  // namespace kvanta::scheduler
