// Random cases over all formats, tiers, chunkings and batches: a hit has the bits of a cold run.
// KVANTA_RANDOM_CASES=1000 runs that many.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "base/math.h"
#include "engine/stored_prefixes.h"

namespace kvanta::engine {
namespace {

int RandomCases() {
  const char* text = std::getenv("KVANTA_RANDOM_CASES");
  if (text != nullptr) return std::atoi(text);
#ifdef KVANTA_SANITIZED
  return 12;
#else
  return 72;
#endif
}

EngineConfig ConfigOfScheme(const std::string& scheme) {
  EngineConfig config = TinyConfig(ModelFor(scheme), scheme);
  config.page_size = std::max(config.page_size, formats::Find(KvScheme::Parse(scheme).k.format).scaling.token_group);
  return config;
}

// One format's engines: one without a prefix cache, and one with a folder that is restarted now and then.
class Tiers {
 public:
  explicit Tiers(const std::string& scheme) : config_(ConfigOfScheme(scheme)) {
    EngineConfig cold = config_;
    cold.enable_prefix_caching = false;
    cold_ = std::make_unique<Engine>(cold);
    config_.kv_cache_dir = folder_.Path();
    Restart();
  }

  void Restart() {
    if (engine_) hits_ = DiskHits();
    engine_.reset();
    engine_ = std::make_unique<Engine>(config_);
  }
  // Puts the beginning of the next prompt into memory, on disk, or on both.
  void Prepare(std::mt19937_64& random, const std::vector<int32_t>& prompt) {
    engine_->FlushPrefixCache();
    switch (random() % 4) {
      case 0:  // memory
        return;
      case 1:
        engine_->ResetPrefixCache();
        return;
      case 2:
        Restart();
        return;
      default: {  // its first page in memory, the others on disk
        engine_->ResetPrefixCache();
        const auto first = static_cast<size_t>(config_.page_size) + 1;
        if (prompt.size() > first) StoredLogits(*engine_, {prompt.begin(), prompt.begin() + static_cast<int>(first)});
      }
    }
  }
  testing::AssertionResult SameLogits(const std::vector<int32_t>& prompt, int chunk) {
    const Scored run = StoredLogits(*engine_, prompt, chunk);
    if (SameRows(ColdLogits(*cold_, prompt), run.logits, run.cached)) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "logits, chunks of " << chunk << ", " << run.cached << " tokens cached";
  }
  testing::AssertionResult SameTokens(const std::vector<Request>& batch) {
    for (const Request& request : batch) engine_->Add(request);
    const auto results = RunAll(*engine_);
    for (const Request& request : batch) {
      const Collected want = RunOne(*cold_, request);
      const Collected& got = results.at(request.id);
      if (!got.error.empty() || got.tokens != want.tokens || !Same(got.logprobs, want.logprobs)) {
        return testing::AssertionFailure() << "request " << request.id << " of " << batch.size() << ": " << got.error;
      }
    }
    return testing::AssertionSuccess();
  }
  int64_t DiskHits() const { return hits_ + engine_->Stats().disk.hit_tokens; }
  int64_t Damaged() const { return engine_->Stats().disk.damaged_files; }

 private:
  weights::TempFolder folder_;
  EngineConfig config_;
  std::unique_ptr<Engine> cold_, engine_;
  int64_t hits_ = 0;  // hits of engines that are gone
};

TEST(DiskFormats, EveryFormatHasTheBitsOfAColdRun) {
  std::vector<std::string> schemes = {"k=int5_g32,v=int4", "int4+exact=2+sink=2", "t3+exact=2"};
  for (const formats::Format& format : formats::All()) {
    if (formats::IsAllocated(format.code)) continue;  // needs a calibrated model: tests/python/test_query_keys.py
    schemes.emplace_back(format.name);
  }
  const int64_t cases = CeilDiv(RandomCases(), std::ssize(schemes));
  std::mt19937_64 random(800);
  int number = 0;
  for (const std::string& scheme : schemes) {
    SCOPED_TRACE(scheme);
    Tiers tiers(scheme);
    std::vector<std::vector<int32_t>> stems;
    for (int i = 0; i < 2; ++i) stems.push_back(RandomTokens(random, 100));
    for (const auto& stem : stems) ASSERT_TRUE(tiers.SameLogits(stem, 0));
    for (int64_t i = 0; i < cases; ++i) {
      std::vector<Request> batch;
      for (uint64_t size = random() % 3 + 1; size > 0; --size) {
        batch.push_back(RandomRequest(random, stems, number++));
        std::vector<int32_t>& tokens = batch.back().prompt;
        tokens.resize(std::min<size_t>(tokens.size(), 120));
        batch.back().sampling.max_tokens = 4;
        batch.back().cache_salt = "";
      }
      std::vector<int32_t> prompt = stems[random() % 2];
      prompt.resize(random() % 67 + 34);
      tiers.Prepare(random, prompt);
      if (random() % 2 == 0) {
        ASSERT_TRUE(tiers.SameLogits(prompt, static_cast<int>(random() % 64 + 1))) << "case " << i;
      } else {
        batch.front().prompt = prompt;
        ASSERT_TRUE(tiers.SameTokens(batch)) << "case " << i;
      }
    }
    tiers.Restart();
    ASSERT_TRUE(tiers.SameLogits(stems[0], 0));
    EXPECT_GT(tiers.DiskHits(), 0);
    EXPECT_EQ(tiers.Damaged(), 0);
  }
}

}  // namespace
}  // namespace kvanta::engine
