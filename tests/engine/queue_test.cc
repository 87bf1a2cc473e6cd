// Queue limit, deadlines, aborts with reasons, draining, and their counters.
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "engine/request_queue.h"
#include "engine/requests.h"
#include "scheduler/scheduler_world.h"

namespace kvanta::engine {
namespace {

Request Numbered(int number, int max_tokens = 5) {
  return {.id = std::to_string(number), .prompt = {1, 2, 3}, .sampling = Greedy(max_tokens)};
}

// Number of a hundred requests that are accepted.
int AcceptedAtOnce(Engine& engine, int first) {
  for (int i = 0; i < 100; ++i) {
    try {
      engine.Add(Numbered(first + i));
    } catch (const QueueFullError&) {
      return i;
    }
  }
  return 100;
}

// A request that has ended, as by a failure while it is admitted, takes its pending abort along.
TEST(RequestQueue, APendingAbortEndsWithItsRequest) {
  scheduler::World world(scheduler::Config(1, scheduler::kPage), 1 << 20);
  const auto make = [&](int number) {
    return std::make_shared<RequestState>(Numbered(number), std::vector<int32_t>(), 1, world.cache);
  };
  RequestQueue queue;
  for (const int number : {0, 1, 2}) queue.Add(make(number));
  EXPECT_EQ(queue.Waiting(), 3);
  queue.AddAbort({"0", "gone"});
  queue.AddAbort({"1", "gone"});
  EXPECT_EQ(queue.Take("1")->request.id, "1");
  queue.Release("1");
  queue.Add(make(1));
  std::vector<std::string> taken;
  queue.TakeAll([&](const auto& request) { taken.push_back(request->request.id); });
  EXPECT_EQ(taken, (std::vector<std::string>{"0", "2", "1"}));
  EXPECT_EQ(queue.Waiting(), 0);
  EXPECT_EQ(queue.Take("2"), nullptr) << "taken";
  EXPECT_TRUE(queue.Contains("2"));
  const auto aborts = queue.TakeAborts();
  ASSERT_EQ(aborts.size(), 1u) << "the second 1 is another request";
  EXPECT_EQ(aborts[0].id, "0");
  EXPECT_TRUE(queue.TakeAborts().empty());
  std::vector<RequestOutput> outputs;
  queue.AddOutput(make(3)->LastOutput(FinishReason::kAbort, ""));
  EXPECT_TRUE(queue.HasUpdates());
  queue.TakeOutputs(outputs);
  EXPECT_EQ(outputs.size(), 1u);
  EXPECT_GE(outputs.capacity(), 4u) << "memory for the last output of each unfinished request";
  EXPECT_FALSE(queue.HasUpdates());
  EXPECT_TRUE(queue.HasUnfinished());
  for (const char* id : {"0", "1", "2"}) queue.Release(id);
  EXPECT_FALSE(queue.HasUnfinished());
}

TEST(Queue, AcceptsRunningAndQueuedRequestsUpToTheLimit) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_seqs = 3;
  config.max_queued_requests = 2;
  Engine engine(config);
  EXPECT_EQ(AcceptedAtOnce(engine, 0), 5) << "three places are free, two may wait";
  std::vector<RequestOutput> outputs;
  engine.Step(outputs);
  EXPECT_EQ(engine.Stats().running, 3);
  EXPECT_EQ(engine.Stats().waiting, 2);
  EXPECT_EQ(AcceptedAtOnce(engine, 100), 0);
  engine.Abort("4");
  EXPECT_EQ(AcceptedAtOnce(engine, 200), 1) << "one that waited has gone";
  try {
    engine.Add(Numbered(300));
    FAIL() << "taken";
  } catch (const QueueFullError& error) {
    EXPECT_STREQ(error.what(), "the queue is full: 3 requests run and 2 wait; max_queued_requests = 2");
  }
  EXPECT_EQ(engine.Stats().refused, 4);
  EXPECT_EQ(RunAll(engine).size(), 6u);
  EXPECT_EQ(AcceptedAtOnce(engine, 400), 5) << "idle again";
  RunAll(engine);
  EXPECT_EQ(engine.Stats().finished_abort, 1);
  EXPECT_EQ(engine.Stats().finished_length, 10);
}

TEST(Queue, WithoutALimitAcceptsEverything) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_seqs = 1;
  Engine engine(config);
  EXPECT_EQ(AcceptedAtOnce(engine, 0), 100);
}

TEST(Queue, ARefusedIdMayBeUsedAgain) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_seqs = 1;
  config.max_queued_requests = 1;
  Engine engine(config);
  engine.Add(Numbered(0));
  engine.Add(Numbered(1));
  EXPECT_THROW(engine.Add(Numbered(2)), QueueFullError);
  EXPECT_THROW(engine.Add(Numbered(1)), InputError) << "a wrong request is wrong on a full queue, too";
  RunAll(engine);
  engine.Add(Numbered(2));
  EXPECT_EQ(RunAll(engine)["2"].tokens.size(), 5u);
}

TEST(Deadline, EndsRunningAndWaitingRequestsAndFreesTheirPages) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.enable_prefix_caching = false;
  config.max_num_seqs = 1;
  Engine engine(config);
  Request request = Numbered(0, 50);
  request.timeout_seconds = 1e9;
  engine.Add(request);
  request = Numbered(1, 50);
  request.timeout_seconds = 1e-9;  // over by the next step, while it waits
  std::vector<RequestOutput> outputs;
  engine.Step(outputs);
  engine.Add(request);
  ASSERT_TRUE(engine.Step(outputs));
  ASSERT_EQ(outputs.size(), 2u);
  EXPECT_EQ(outputs[0].id, "1");
  EXPECT_EQ(outputs[0].finish, FinishReason::kTimeout);
  EXPECT_EQ(outputs[0].error, "not finished within 1e-09 s: 0 tokens were generated");
  EXPECT_EQ(outputs[0].times.scheduled, 0);
  EXPECT_EQ(outputs[1].id, "0");
  EXPECT_EQ(RunAll(engine)["0"].finish, FinishReason::kLength);
  EXPECT_EQ(engine.Stats().finished_timeout, 1);
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0);
  request.timeout_seconds = -1;
  EXPECT_THROW(engine.Add(request), InputError);
}

TEST(Abort, GivesItsReason) {
  Engine engine(TinyConfig(Model(), "int8"));
  engine.Add(Numbered(0));
  engine.Abort("0", "the client has gone");
  EXPECT_EQ(RunAll(engine)["0"].error, "the client has gone");
}

TEST(Times, AreInOrderAndCountersAddUp) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_seqs = 1;
  Engine engine(config);
  std::mt19937_64 random(3);
  const auto prompt = RandomTokens(random, 50);
  engine.Add({.id = "a", .prompt = prompt, .sampling = Greedy(4)});
  engine.Add({.id = "b", .prompt = prompt, .sampling = Greedy(4)});
  std::map<std::string, RequestTimes> times;
  std::vector<RequestOutput> outputs;
  while (engine.Step(outputs)) {
    for (const RequestOutput& output : outputs) times[output.id] = output.times;
  }
  for (const auto& [id, at] : times) {
    EXPECT_GT(at.added, 0) << id;
    EXPECT_GE(at.scheduled, at.added);
    EXPECT_GT(at.first_token, at.scheduled);
    EXPECT_GT(at.last_token, at.first_token);
  }
  EXPECT_GE(times["b"].scheduled, times["a"].last_token) << "one at a time";
  const EngineStats stats = engine.Stats();
  EXPECT_EQ(stats.prefix_queries, 100);
  EXPECT_EQ(stats.cached_tokens, 48);
  EXPECT_EQ(stats.prompt_tokens, 52);
  int64_t bytes = 0;
  for (const LayerStats& layer : stats.layers) bytes += layer.page_bytes;
  EXPECT_EQ(bytes, stats.page_bytes);
}

// Preempted requests count their prompt once.
TEST(Times, PreemptionsDoNotCountAPromptTwice) {
  EngineConfig config = TinyConfig(Model(), "int8");
  const CachePlan plan = PlanCacheBytes(config);
  config.kv_cache_memory_bytes = 8 * plan.page_bytes;
  Engine engine(config);
  std::mt19937_64 random(4);
  for (int i = 0; i < 8; ++i) {
    engine.Add({.id = std::to_string(i), .prompt = RandomTokens(random, 30), .sampling = Greedy(60)});
  }
  std::vector<RequestOutput> outputs;
  int preemptions = 0;
  while (engine.Step(outputs)) {
    for (const RequestOutput& output : outputs) {
      if (output.finish != FinishReason::kNone) preemptions += output.preemptions;
    }
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_EQ(engine.Stats().preemptions, preemptions);
  EXPECT_EQ(engine.Stats().prompt_tokens + engine.Stats().cached_tokens, 8 * 30);
  EXPECT_GT(engine.Stats().prefix_evictions, 0);
}

TEST(Drain, FinishesRequestsAndRefusesNewOnes) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_seqs = 2;
  Engine engine(config);
  std::atomic<int> ends = 0;
  std::atomic<bool> refused = false;
  std::mutex mutex;
  std::condition_variable begun;
  bool runs = false;
  bool drains = false;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    std::unique_lock lock(mutex);
    runs = true;
    begun.notify_all();
    begun.wait(lock, [&] { return drains; });
    for (const RequestOutput& output : outputs) ends += output.finish == FinishReason::kLength ? 1 : 0;
    if (ends == 6) {  // the last: Stop(true) is surely waiting
      try {
        engine.Add(Numbered(99));
      } catch (const ResourceError&) {
        refused = true;
      }
    }
  });
  for (int i = 0; i < 6; ++i) engine.Add(Numbered(i, 20));
  {
    std::unique_lock lock(mutex);
    begun.wait(lock, [&] { return runs; });
  }
  std::jthread stopper([&] { engine.Stop(true); });
  // Draining has begun when nothing more is taken.
  for (int i = 100; !refused; ++i) {
    try {
      engine.Add(Numbered(i, 1));
      engine.Abort(std::to_string(i));
    } catch (const ResourceError&) {
      break;
    }
  }
  {
    const std::lock_guard lock(mutex);
    drains = true;
    begun.notify_all();
  }
  stopper.join();
  EXPECT_EQ(ends, 6);
  EXPECT_TRUE(refused);
  EXPECT_EQ(engine.Stats().running + engine.Stats().waiting, 0);
  engine.Add(Numbered(7));
  EXPECT_EQ(RunAll(engine)["7"].tokens.size(), 5u) << "stopped, not broken";
}

TEST(Drain, StopsAnIdleEngine) {
  Engine engine(TinyConfig(Model(), "int8"));
  engine.Start([](std::span<const RequestOutput>) {});
  engine.Stop(true);
  engine.Stop(true);
  // It runs again, too.
  std::map<std::string, Collected> results;
  std::promise<void> end;
  engine.Start([&](std::span<const RequestOutput> outputs) {
    Collect(outputs, results);
    if (results["0"].finish != FinishReason::kNone) end.set_value();
  });
  engine.Add(Numbered(0));
  end.get_future().wait();
  engine.Stop();
  EXPECT_EQ(results["0"].tokens.size(), 5u);
}

TEST(Drain, IsCutShortByAStop) {
  Engine engine(TinyConfig(Model(), "int8"));
  std::jthread drainer;
  std::atomic<int> calls = 0;
  engine.Start([&](std::span<const RequestOutput>) {
    if (++calls == 1) {
      engine.Stop(true);   // from the callback: only asks
      engine.Stop(false);  // the last word
    }
  });
  engine.Add(Numbered(0, 100));
  while (calls == 0) std::this_thread::yield();
  engine.Stop();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(engine.Stats().running, 1) << "it may go on after the next Start";
}

}  // namespace
}  // namespace kvanta::engine
