#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "error_of.h"
#include "kvanta/error.h"

namespace kvanta {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceOnAValidWorker) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
      std::atomic<bool> worker_in_range{true};
      auto body = [&](int64_t task, int worker) {
        runs[static_cast<size_t>(task)].fetch_add(1);
        if (worker < 0 || worker >= threads) worker_in_range = false;
      };
      pool.ForEach(tasks, body);
      EXPECT_TRUE(std::ranges::all_of(runs, [](const auto& n) { return n.load() == 1; })) << threads << " " << tasks;
      EXPECT_TRUE(worker_in_range);
    }
  }
}

// Plain (not atomic) writes of one region must be visible to the next: the sanitizer build would see a race.
TEST(ThreadPool, RegionsAreOrdered) {
  ThreadPool pool(4);
  std::vector<int64_t> values(64, 0);
  for (int round = 0; round < 2000; ++round) {
    auto body = [&](int64_t task, int) {
      const auto mirrored = values.size() - 1 - static_cast<size_t>(task);
      if (round % 2 == 0) {
        values[static_cast<size_t>(task)] += 1;
      } else {
        values[mirrored] += 1;
      }
    };
    pool.ForEach(static_cast<int64_t>(values.size()), body);
    if (round % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // let the workers fall asleep
  }
  EXPECT_EQ(std::accumulate(values.begin(), values.end(), int64_t{0}), 64 * 2000);
}

// On any worker; the pool runs later regions as before.
TEST(ThreadPool, ThrowsTheExceptionOfATask) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    for (const int64_t bad : {0, 3, 49, 99}) {
      auto fail = [&](int64_t task, int) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // so that every worker has tasks
        if (task % 50 == bad % 50) throw InputError("task " + std::to_string(task % 50));
      };
      EXPECT_EQ(ErrorOf([&] { pool.ForEach(100, fail); }), "task " + std::to_string(bad % 50));
      std::atomic<int> runs = 0;
      auto count = [&](int64_t, int) { ++runs; };
      pool.ForEach(100, count);
      EXPECT_EQ(runs, 100);
    }
  }
}

// Tasks that have not begun when one throws are skipped.
TEST(ThreadPool, SkipsTasksAfterAnException) {
  ThreadPool pool(2);
  std::atomic<int> runs = 0;
  auto fail = [&](int64_t, int) {
    if (++runs == 1) throw InputError("first");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  EXPECT_THROW(pool.ForEach(10'000, fail), InputError);
  EXPECT_LT(runs, 10'000);
}

// A worker's number stands for its memory.
TEST(ThreadPool, NoTwoCallersShareAWorker) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    std::vector<std::atomic<bool>> is_busy(static_cast<size_t>(threads));
    std::atomic<int> shared = 0;
    auto body = [&](int64_t, int worker) {
      std::atomic<bool>& busy = is_busy[static_cast<size_t>(worker)];
      shared += busy.exchange(true) ? 1 : 0;
      for (int i = 0; i < 10; ++i) std::this_thread::yield();
      busy = false;
    };
    const auto call = [&](int64_t tasks) {
      for (int i = 0; i < 300; ++i) pool.ForEach(tasks, body);
    };
    std::jthread one([&] { call(1); }), another([&] { call(1); });
    call(3);
    one.join();
    another.join();
    EXPECT_EQ(shared, 0) << threads;
  }
}

TEST(ThreadPool, RefusesNonsense) {
  EXPECT_THROW(ThreadPool(-1), InputError);
  EXPECT_THROW(ThreadPool(100000), InputError);
  EXPECT_GE(ThreadPool(0).Threads(), 1);
}

}  // namespace
}  // namespace kvanta
