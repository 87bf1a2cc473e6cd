// The engine's own thread: other threads add, abort and read statistics while it runs.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "engine/loop_thread.h"
#include "engine/requests.h"

namespace kvanta::engine {
namespace {

// Collects outputs on the engine's thread; tests wait for a number of finished requests.
class Listener {
 public:
  StepCallback Callback() {
    return [this](std::span<const RequestOutput> outputs) {
      const std::lock_guard lock(mutex_);
      Collect(outputs, results_);
      for (const RequestOutput& output : outputs) finished_ += output.finish != FinishReason::kNone ? 1 : 0;
      changed_.notify_all();
    };
  }
  std::map<std::string, Collected> WaitFor(int finished) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ >= finished; });
    return results_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Collected> results_;
  int finished_ = 0;
};

TEST(EngineThread, ServesManyCallersWithTheTokensOfOne) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.kv_cache_memory_bytes = 120000;
  config.threads = 2;
  Engine engine(config);
  config.threads = 1;
  config.enable_prefix_caching = false;
  Engine alone(config);
  Listener listener;
  engine.Start(listener.Callback());
  constexpr int kCallers = 4;
  constexpr int kEach = 10;
  const auto request = [](int number) {
    std::mt19937_64 random(static_cast<uint64_t>(number));
    Request made{.id = std::to_string(number), .prompt = RandomTokens(random, 1 + number), .sampling = Greedy(25)};
    made.sampling.temperature = 0.8F;
    return made;
  };
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] {
        for (int i = 0; i < kEach; ++i) {
          engine.Add(request(caller * kEach + i));
          engine.Stats();
        }
      });
    }
  }
  const auto results = listener.WaitFor(kCallers * kEach);
  engine.Stop();
  for (int number = 0; number < kCallers * kEach; ++number) {
    EXPECT_EQ(results.at(std::to_string(number)).tokens, RunOne(alone, request(number)).tokens);
  }
  EXPECT_EQ(engine.Stats().running, 0);
}

TEST(EngineThread, AbortsFromAnotherThreadEndEveryRequestOnce) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.enable_prefix_caching = false;
  Engine engine(config);
  Listener listener;
  engine.Start(listener.Callback());
  constexpr int kRequests = 60;
  std::jthread aborter([&] {
    for (int i = 0; i < kRequests; i += 2) engine.Abort(std::to_string(i));
    for (int i = 0; i < kRequests; i += 2) engine.Abort(std::to_string(i));
  });
  for (int i = 0; i < kRequests; ++i) {
    engine.Add({.id = std::to_string(i), .prompt = {1, 2, 3}, .sampling = Greedy(20)});
    if (i % 3 == 0) engine.Abort(std::to_string(i));
  }
  const auto results = listener.WaitFor(kRequests);
  aborter.join();
  engine.Stop();
  EXPECT_EQ(results.size(), static_cast<size_t>(kRequests));
  for (const auto& [id, result] : results) {
    EXPECT_TRUE(result.finish == FinishReason::kAbort || result.tokens.size() == 20u) << id;
  }
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
}

TEST(EngineThread, CallbackMayAddAndAbort) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::atomic<int> ends = 0;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) {
      if (output.finish == FinishReason::kNone) continue;
      if (output.id == "first") engine.Add({.id = "second", .prompt = {4}, .sampling = Greedy(100)});
      ++ends;
      ends.notify_all();
    }
    if (outputs[0].id == "second" && outputs[0].finish == FinishReason::kNone) engine.Abort("second");
  });
  engine.Add({.id = "first", .prompt = {1, 2}, .sampling = Greedy(3)});
  while (ends < 2) ends.wait(ends);
  engine.Stop();
  EXPECT_EQ(ends, 2);
}

TEST(EngineThread, ContinuesAfterACallbackThatThrows) {
  EngineConfig config = TinyConfig(Model(), "int8");
  std::mutex mutex;
  std::vector<std::string> warnings;
  config.on_warning = [&](const std::string& warning) {
    const std::lock_guard lock(mutex);
    warnings.push_back(warning);
    throw std::runtime_error("nor may this end the loop");
  };
  Engine engine(config);
  std::atomic<int> ends = 0;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    if (outputs[0].finish != FinishReason::kNone) {
      ++ends;
      ends.notify_all();
    }
    if (ends > 0) throw 42;  // not even an exception
    throw std::runtime_error("no");
  });
  engine.Add({.id = "a", .prompt = {1, 2}, .sampling = Greedy(3)});
  while (ends < 1) ends.wait(0);
  engine.Stop();
  EXPECT_EQ(warnings.size(), 3u);
}

TEST(EngineThread, StartsOnceAndAgainAfterStop) {
  Listener listener;  // outlives the engine, which calls it until it has stopped
  Engine engine(TinyConfig(Model(), "int8"));
  engine.Start(listener.Callback());
  EXPECT_THROW(engine.Start(listener.Callback()), InputError);
  std::vector<RequestOutput> outputs;
  EXPECT_THROW(engine.Step(outputs), InputError);
  std::vector<float> logits(96);
  const int32_t token = 1;
  EXPECT_THROW(engine.Logits({&token, 1}, 0, logits), InputError);
  EXPECT_THROW(engine.CollectStatistics({&token, 1}), InputError);
  engine.Stop();
  engine.Stop();
  engine.Start(listener.Callback());
  engine.Add({.id = "a", .prompt = {1, 2}, .sampling = Greedy(3)});
  listener.WaitFor(1);
  // The destructor stops a running engine, with work in it.
  engine.Add({.id = "b", .prompt = {1, 2}, .sampling = Greedy(100)});
}

// The second of two that wait for the end of a loop does not wait for that of a later one, whose
// thread may have the id of the first one's.
TEST(LoopThread, WaitForEndIsOfTheLoopThatRan) {
  LoopThread loop_thread;
  std::mutex mutex;
  std::condition_variable_any joins_begun;
  int joins = 0, ended = 0;
  std::atomic<int> first_loops = 0;
  const auto second_loop = [&](const std::stop_token& stop) {
    std::unique_lock lock(mutex);
    joins_begun.wait(lock, stop, [] { return false; });
  };
  const auto join = [&] {
    std::unique_lock lock(mutex);
    if (++joins == 2) joins_begun.notify_all();
    if (!loop_thread.WaitForEnd(lock)) return;
    ++ended;
    loop_thread.Start(second_loop);
  };
  std::unique_lock lock(mutex);
  loop_thread.Start([&](const std::stop_token&) {
    std::unique_lock own(mutex);
    joins_begun.wait(own, [&] { return joins == 2; });
    EXPECT_FALSE(loop_thread.WaitForEnd(own)) << "the loop itself does not wait";
    ++first_loops;
  });
  lock.unlock();
  std::thread first(join), second(join);
  first.join();
  second.join();
  lock.lock();
  EXPECT_EQ(first_loops, 1);
  EXPECT_EQ(ended, 1);
  EXPECT_TRUE(loop_thread.IsStarted());
  loop_thread.RequestStop();
  EXPECT_TRUE(loop_thread.WaitForEnd(lock));
  EXPECT_FALSE(loop_thread.IsStarted());
  EXPECT_FALSE(loop_thread.WaitForEnd(lock));
}

}  // namespace
}  // namespace kvanta::engine
