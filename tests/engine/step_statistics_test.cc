// Statistics of steps: a step that fails counts nothing, and the time of an asynchronous device counts as the model's.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <numeric>
#include <thread>

#include "engine/engine_impl.h"
#include "engine/stored_prefixes.h"
#include "kvanta/error.h"
#include "observe/forwarding_backend.h"
#include "store/fake_clock.h"

namespace kvanta::engine {
namespace {

// Steps of the engine under test.
struct DeviceScript {
  std::chrono::milliseconds fetch{0};  // of a device that computes while the host goes on, until its counts are fetched
  bool fails = false;                  // no step can begin
};

class ScriptedDevice final : public observe::ForwardingBackend {
 public:
  ScriptedDevice(std::unique_ptr<attention::Backend> inner, const DeviceScript& script)
      : ForwardingBackend(std::move(inner)), script_(script) {}

  std::unique_ptr<attention::Plan> MakePlan(const attention::BatchShape& batch,
                                            std::unique_ptr<attention::Plan> plan) override {
    if (script_.fails) throw ResourceError("no memory for a plan");
    return ForwardingBackend::MakePlan(batch, std::move(plan));
  }
  void FetchCounts() override {
    std::this_thread::sleep_for(script_.fetch);
    ForwardingBackend::FetchCounts();
  }

 private:
  const DeviceScript& script_;
};

EngineComponents ComponentsOn(const DeviceScript& script, const EngineConfig& config) {
  EngineComponents components = LoadComponents(config);
  components.make_backend = [inner = std::move(components.make_backend), &script](cache::PagePool& pool,
                                                                                  attention::BackendConfig setup) {
    return std::make_unique<ScriptedDevice>(inner(pool, std::move(setup)), script);
  };
  return components;
}

TEST(StepStatistics, AStepThatFailsCountsNothing) {
  DeviceScript script;
  Engine::Impl engine(ComponentsOn(script, TinyConfig(Model(), "int8")));
  script.fails = true;
  EXPECT_EQ(RunOne(engine, GreedyRequest("fails", {1, 2, 3}, 4)).error, "no memory for a plan");
  EXPECT_EQ(engine.Stats().steps, 0);
  EXPECT_EQ(engine.Stats().prompt_tokens, 0);
  EXPECT_EQ(engine.Stats().finished_error, 1);
  script.fails = false;
  EXPECT_EQ(RunOne(engine, GreedyRequest("goes on", {1, 2, 3}, 4)).tokens.size(), 4u);
  const EngineStats stats = engine.Stats();
  EXPECT_EQ(stats.steps, 4);
  EXPECT_EQ(stats.prompt_tokens, 3);
  EXPECT_EQ(std::accumulate(stats.step_tokens.begin(), stats.step_tokens.end(), int64_t{0}), stats.steps);
}

TEST(StepStatistics, TheTimeOfADeviceIsTheModels) {
  const DeviceScript script{.fetch = std::chrono::milliseconds(5)};
  EngineConfig config = TinyConfig(Model(), "int8");
  config.max_num_batched_tokens = 32;
  Engine::Impl engine(ComponentsOn(script, config));
  RunOne(engine, GreedyRequest("a", std::vector<int32_t>(100, 1), 1));
  EXPECT_EQ(engine.Stats().steps, 4);
  EXPECT_GE(engine.Stats().seconds_forward, 0.020);
}

// The store's pages are compared with the time of computing, also where that goes on behind the host's back.
TEST_F(DiskTierTest, PagesThatADeviceComputesSlowlyAreLoaded) {
  EngineConfig config = StoredConfig(folder_.Path());
  config.max_num_batched_tokens = 128;
  Fill(config);
  const DeviceScript script{.fetch = std::chrono::milliseconds(50)};
  EngineComponents components = ComponentsOn(script, config);
  const store::FakeClock clock;
  components.now = clock;
  components.before_read = [&] { clock.Advance(0.006); };  // six of them: more than computing takes the host
  Engine::Impl engine(std::move(components));
  EXPECT_EQ(RunOne(engine, GreedyRequest("first", tokens_, 1)).cached_tokens, 96);  // nothing is measured yet
  RunOne(engine, GreedyRequest("measures", Tokens(5, 100), 1));
  for (const char* id : {"second", "third"}) {  // one load is tried against the rates
    engine.ResetPrefixCache();
    EXPECT_EQ(RunOne(engine, GreedyRequest(id, tokens_, 1)).cached_tokens, 96) << id;
  }
  EXPECT_EQ(engine.Stats().disk.declined_tokens, 0);
}

}  // namespace
}  // namespace kvanta::engine
