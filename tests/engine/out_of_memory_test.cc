// Allocations that fail on the engine's own thread: every request still ends exactly once, and the thread goes on.
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include "engine/requests.h"
#include "failing_new.h"

namespace kvanta::engine {
namespace {

struct AnyToken final : TokenConstraint {};

// Serves rounds of requests on the engine's own thread. In each round, allocations [first, first + count) of that
// thread fail; those of the callback do not.
class FailingServer {
 public:
  explicit FailingServer(EngineConfig config) : engine_(std::move(config)) {
    engine_.Start([this](std::span<const RequestOutput> outputs) {
      const int64_t left = std::exchange(allocations_left, -1);
      const bool armed = OnStep(outputs);
      if (!armed) allocations_left = left;
    });
  }
  ~FailingServer() { engine_.Stop(); }

  // Serves one request that arms the failures, then `requests`; returns true if any allocation failed.
  bool ServeRound(std::vector<Request> requests, int64_t first, int64_t count) {
    std::unique_lock lock(mutex_);
    finishes_.clear();
    requests_ = std::move(requests);
    first_ = first;
    count_ = count;
    ended_ = 0;
    const int expected = static_cast<int>(requests_.size()) + 1;
    lock.unlock();
    engine_.Add({.id = "arm", .prompt = {1}, .sampling = Greedy(1)});
    lock.lock();
    changed_.wait(lock, [&] { return ended_ == expected; });
    return failures_pending_ < count;
  }
  const std::map<std::string, std::vector<FinishReason>>& Finishes() const { return finishes_; }
  Engine& engine() { return engine_; }

 private:
  bool OnStep(std::span<const RequestOutput> outputs) {
    const std::lock_guard lock(mutex_);
    bool armed = false;
    for (const RequestOutput& output : outputs) {
      if (output.id == "aborted" && output.finish == FinishReason::kNone) engine_.Abort(output.id, "no longer needed");
      if (output.finish == FinishReason::kNone) continue;
      ++ended_;
      finishes_[output.id].push_back(output.finish);
      if (output.id != "arm") continue;
      for (Request& request : requests_) engine_.Add(std::move(request));
      allocations_left = first_;
      failures_left = count_;
      armed = true;
    }
    if (!armed) failures_pending_ = failures_left;
    changed_.notify_all();
    return armed;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<FinishReason>> finishes_;
  std::vector<Request> requests_;
  int64_t first_ = 0, count_ = 0, failures_pending_ = 0;
  int ended_ = 0;
  Engine engine_;
};

std::vector<Request> MixedRequests(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto request = [&](std::string id, int prompt_tokens) {
    return Request{.id = std::move(id), .prompt = RandomTokens(random, prompt_tokens), .sampling = Greedy(3)};
  };
  std::vector<Request> requests{request("logprobs", 20), request("constrained", 5), request("aborted", 33),
                                request("overdue with an id that needs memory", 4)};
  requests[0].sampling.logprobs = 2;
  requests[0].sampling.prompt_logprobs = 1;
  requests[0].sampling.repetition_penalty = 1.2F;
  requests[0].sampling.temperature = 0.8F;
  requests[1].constraint = std::make_shared<AnyToken>();
  requests[2].sampling.max_tokens = 60;
  requests[3].timeout_seconds = 1e-9;
  return requests;
}

TEST(OutOfMemory, OnTheEnginesThreadEndsEveryRequestOnce) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.quality_sample_rate = 1;
  config.fill_masks = [](std::span<MaskTask> tasks) {
    for (MaskTask& task : tasks) std::ranges::fill(task.mask, ~0U);
  };
#ifdef KVANTA_SANITIZED
  constexpr int64_t kStride = 7;  // rounds are slow there
#else
  constexpr int64_t kStride = 1;
#endif
  for (const int64_t failures : {1, 4}) {
    FailingServer server(config);
    bool failed = true;
    int64_t first = 0;
    for (; failed; first += kStride) {
      failed = server.ServeRound(MixedRequests(static_cast<uint64_t>(first)), first, failures);
      ASSERT_EQ(server.Finishes().size(), 5u) << "allocation " << first;
      for (const auto& [id, finishes] : server.Finishes()) {
        ASSERT_EQ(finishes.size(), 1u) << id << " at allocation " << first;
      }
    }
    EXPECT_GT(first, 50) << "few allocations were tried";
    EXPECT_EQ(server.Finishes().at("logprobs"), std::vector{FinishReason::kLength});
    server.engine().Stop();
    EXPECT_EQ(server.engine().Stats().running + server.engine().Stats().waiting, 0);
    server.engine().ResetPrefixCache();
    EXPECT_EQ(server.engine().Stats().cache_used_bytes, 0);
  }
}

}  // namespace
}  // namespace kvanta::engine
