// Sequences that reserve memory before their pages are loaded.
#include <gtest/gtest.h>

#include "scheduler/scheduler.h"
#include "scheduler/scheduler_world.h"

namespace kvanta::scheduler {
namespace {

// A waiting sequence whose pages are being loaded: the memory of all its tokens is kept from those after it.
TEST(Scheduler, APreparedSequenceHasItsMemory) {
  World world(Config(4, 64), 6 * 1024, false, 0);
  auto running = world.Make(kPage, 1), loading = world.Make(3 * kPage, 2), small = world.Make(kPage, 3);
  auto large = world.Make(2 * kPage, 4);
  world.Run(*running);
  loading->loading = true;
  world.scheduler.Add(*loading);
  ASSERT_TRUE(world.scheduler.Prepare(*loading));
  world.scheduler.Add(*large);
  EXPECT_TRUE(world.scheduler.Schedule().empty()) << "2 of 6 pages are left, of which one is for the running sequence";
  world.scheduler.Remove(*large);
  world.scheduler.Add(*small);
  ASSERT_EQ(world.scheduler.Schedule().size(), 1u) << "others pass with what is left";
  world.scheduler.Commit();
  EXPECT_EQ(small->Remaining(), 0);
  loading->loading = false;
  ASSERT_EQ(world.scheduler.Schedule().size(), 1u);
  EXPECT_EQ(world.scheduler.Prepared(), 0) << "it runs";
  world.scheduler.Commit();
  EXPECT_EQ(world.scheduler.Preemptions(), 0);
}

TEST(Scheduler, RemoveFreesWhatIsReserved) {
  for (const bool loaded : {false, true}) {
    World world(Config(4, 64), 4 * 1024, false, 0);
    auto first = world.Make(3 * kPage + 1, 1), other = world.Make(3 * kPage, 2);
    world.Run(*first);
    world.scheduler.Remove(*first);  // its pages are cached
    first->loading = true;
    world.scheduler.Add(*first);
    ASSERT_TRUE(world.scheduler.Prepare(*first));
    EXPECT_EQ(world.cache.pool.EvictableBytes(), 0) << "the cached pages are held";
    first->loading = !loaded;
    world.scheduler.Add(*other);
    if (!loaded) {
      EXPECT_TRUE(world.scheduler.Schedule().empty());
      EXPECT_TRUE(world.scheduler.Unschedulable().empty()) << "it waits for the reservation's end";
    }
    world.scheduler.Remove(*first);
    EXPECT_EQ(world.scheduler.Prepared(), 0);
    EXPECT_EQ(world.cache.pool.EvictableBytes(), 3 * 1024);
    ASSERT_EQ(world.scheduler.Schedule().size(), 1u);
    EXPECT_EQ(world.scheduler.Schedule()[0].sequence, other.get());
  }
}

// Reservations hold up nobody before them in the queue, whether it waits or runs.
TEST(Scheduler, ReservationsGiveWayToSequencesBeforeThem) {
  World world(Config(4, 64), 4 * 1024, false, 0);
  auto loading = world.Make(3 * kPage, 1), urgent = world.Make(3 * kPage, 2);
  loading->loading = true;
  loading->priority = 1;
  world.scheduler.Add(*loading);
  ASSERT_TRUE(world.scheduler.Prepare(*loading));
  world.scheduler.Add(*urgent);
  ASSERT_EQ(world.scheduler.Schedule().size(), 1u);
  world.scheduler.Commit();
  EXPECT_FALSE(loading->reservation.has_value());
  EXPECT_FALSE(world.scheduler.Prepare(*loading)) << "2 pages are missing";
  world.scheduler.Remove(*urgent);
  EXPECT_TRUE(world.scheduler.Prepare(*loading));
}

TEST(Scheduler, ReservationsGiveWayToRunningSequencesThatGrow) {
  World world(Config(4, 64), 5 * 1024, false, 0, false);
  auto running = world.Make(kPage, 1), loading = world.Make(3 * kPage, 2);
  world.Run(*running);
  loading->loading = true;
  world.scheduler.Add(*loading);
  ASSERT_TRUE(world.scheduler.Prepare(*loading));
  for (int i = 0; i < kPage; ++i) world.Decode(*running);
  EXPECT_TRUE(loading->reservation.has_value()) << "a page for each running sequence was left";
  for (int i = 0; i < kPage; ++i) world.Decode(*running);
  EXPECT_FALSE(loading->reservation.has_value());
  EXPECT_EQ(world.scheduler.Preemptions(), 0);
}

// A running sequence that came later than a prepared one is preempted before its reservation ends.
TEST(Scheduler, PriorityOrderHoldsBetweenReservationsAndRunningSequences) {
  World world(Config(4, 64), 5 * 1024, false, 0, false);
  auto loading = world.Make(3 * kPage, 1), later = world.Make(kPage, 2);
  loading->loading = true;
  world.scheduler.Add(*loading);
  ASSERT_TRUE(world.scheduler.Prepare(*loading));
  world.Run(*later);
  for (int i = 0; i < 3 * kPage && later->preemptions == 0; ++i) world.Decode(*later);
  EXPECT_EQ(later->preemptions, 1);
  EXPECT_TRUE(loading->reservation.has_value());
  EXPECT_TRUE(world.scheduler.Unschedulable().empty());
  loading->loading = false;
  const auto chunks = world.scheduler.Schedule();
  ASSERT_EQ(chunks.size(), 1u);
  EXPECT_EQ(chunks[0].sequence, loading.get());
}

TEST(Scheduler, ASequenceThatAwaitsMemoryLetsNobodyPass) {
  World world(Config(4, 64), 6 * 1024, false, 0);
  auto running = world.Make(3 * kPage, 1), loading = world.Make(4 * kPage, 2), small = world.Make(kPage, 3);
  world.Run(*running);
  loading->loading = true;
  world.scheduler.Add(*loading);
  EXPECT_FALSE(world.scheduler.Prepare(*loading));
  world.scheduler.Add(*small);
  EXPECT_FALSE(world.scheduler.Prepare(*small)) << "the memory is for those before it";
  loading->awaits_memory = true;
  EXPECT_TRUE(world.scheduler.Schedule().empty());
  world.scheduler.Remove(*running);
  EXPECT_TRUE(world.scheduler.Prepare(*loading));
}

// Random arrivals, lengths, priorities and aborts in caches that are too small: budgets hold, chunks are aligned, all
// sequences finish, all pages are freed, and preemptions occur.

}  // namespace
}  // namespace kvanta::scheduler
