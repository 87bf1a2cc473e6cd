// Telemetry: divergence of the served distribution from an exact cache's, zero scales, profile.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <semaphore>

#include "engine/requests.h"
#include "observe/quality.h"
#include "runner/divergence.h"

namespace kvanta::engine {
namespace {

using observe::QualityMonitor;

struct Divergence {
  int64_t tokens = 0;
  double sum = 0, limit = 0;
};

// In double, from whole sequences of logits of two engines.
void Compare(Engine& served, Engine& exact, const std::vector<int32_t>& tokens, size_t prompt, Divergence& out) {
  const auto q = ColdLogits(served, tokens);
  const auto p = ColdLogits(exact, tokens);
  for (size_t row = prompt - 1; row + 1 < tokens.size(); ++row) {
    const auto log_sum = [&](const std::vector<float>& logits) {
      double sum = 0;
      for (size_t i = 0; i < 96; ++i) sum += std::exp(static_cast<double>(logits[row * 96 + i]));
      return std::log(sum);
    };
    const double p_sum = log_sum(p), q_sum = log_sum(q);
    double kl = 0;
    for (size_t i = row * 96; i < (row + 1) * 96; ++i) {
      kl += std::exp(static_cast<double>(p[i]) - p_sum) * ((p[i] - p_sum) - (q[i] - q_sum));
    }
    ++out.tokens;
    out.sum += kl;
    out.limit = std::max(out.limit, kl);
  }
}

TEST(Quality, IsTheDivergenceOfTheServedDistribution) {
  for (const char* format : {"int4", "k=int8,v=int4", "fp32", "kivi4+exact=2"}) {
    EngineConfig config = TinyConfig(Model(), format);
    if (std::string(format).starts_with("kivi")) config.page_size = 32;
    config.quality_sample_rate = 1;
    Engine engine(config);
    Engine served(config);
    EngineConfig plain = config;
    plain.kv_cache_dtype = "fp32";
    Engine exact(plain);
    std::mt19937_64 random(5);
    std::map<std::string, std::vector<int32_t>> sequences;
    std::map<std::string, size_t> prompts;
    for (int i = 0; i < 5; ++i) {
      Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 1 + i * 17), .sampling = Greedy(40)};
      request.sampling.temperature = 0.9F;
      sequences[request.id] = request.prompt;
      prompts[request.id] = request.prompt.size();
      engine.Add(request);
    }
    const auto results = RunAll(engine);
    EXPECT_EQ(engine.Stats().quality.pending, 5);
    EXPECT_EQ(engine.Stats().quality.tokens, 0) << "not while there is work";
    while (engine.MeasureQuality()) {
    }
    Divergence want;
    for (auto& [id, tokens] : sequences) {
      const auto& made = results.at(id).tokens;
      tokens.insert(tokens.end(), made.begin(), made.end());
      Compare(served, exact, tokens, prompts[id], want);
    }
    const QualityStats got = engine.Stats().quality;
    EXPECT_EQ(got.requests, 5) << format;
    EXPECT_EQ(got.pending + got.skipped, 0);
    EXPECT_EQ(got.tokens, want.tokens);
    // Weights of relative error 3e-7 times differences of logits below 1.
    EXPECT_NEAR(got.kl_sum, want.sum, 1e-6 * static_cast<double>(want.tokens)) << format;
    EXPECT_NEAR(got.kl_max, want.limit, 1e-6) << format;
    if (std::string(format) == "fp32") {
      EXPECT_EQ(got.kl_max, 0);
    } else {
      EXPECT_GT(got.kl_sum, 1e-4) << format;
    }
  }
}

// Their quantized pages never close: all that is compared is exact.
TEST(Quality, MeasuresRequestsOfLessThanAPage) {
  for (const char* format : {"int4", "nvfp4", "kivi4+exact=2"}) {
    EngineConfig config = TinyConfig(Model(), format);
    config.page_size = 64;
    config.quality_sample_rate = 1;
    Engine engine(config);
    RunOne(engine, {.id = "short", .prompt = {1, 2, 3}, .sampling = Greedy(4)});
    while (engine.MeasureQuality()) {
    }
    const QualityStats quality = engine.Stats().quality;
    EXPECT_EQ(quality.requests, 1) << format;
    EXPECT_EQ(quality.skipped, 0) << format;
    EXPECT_LT(quality.kl_max, 1e-3) << format;
  }
}

TEST(Quality, SamplesTheRequestedShareReproducibly) {
  const auto taken = [](double rate) {
    EngineConfig config = TinyConfig(Model(), "int8");
    config.quality_sample_rate = rate;
    Engine engine(config);
    std::vector<int> which;
    for (int i = 0; i < 60; ++i) {
      RunOne(engine, {.id = std::to_string(i), .prompt = {1, 2, 3}, .sampling = Greedy(2)});
      while (engine.MeasureQuality()) {
      }
      which.push_back(static_cast<int>(engine.Stats().quality.requests));
    }
    return which;
  };
  EXPECT_EQ(taken(1).back(), 60);
  EXPECT_EQ(taken(0).back(), 0);
  const auto third = taken(0.3);
  EXPECT_GT(third.back(), 6);
  EXPECT_LT(third.back(), 36);
  EXPECT_EQ(taken(0.3), third);
}

TEST(Quality, GivesWayToRequestsAndChangesNothing) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.quality_sample_rate = 1;
  Engine engine(config);
  Engine alone(TinyConfig(Model(), "int4"));
  std::mt19937_64 random(9);
  std::vector<RequestOutput> outputs;
  for (int i = 0; i < 6; ++i) {
    const Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 60), .sampling = Greedy(60)};
    EXPECT_EQ(RunOne(engine, request).tokens, RunOne(alone, request).tokens);
    engine.MeasureQuality();  // leaves a comparison half done
  }
  EXPECT_GT(engine.Stats().quality.pending, 0);
  while (engine.MeasureQuality()) {
  }
  EXPECT_EQ(engine.Stats().quality.requests, 6);
}

TEST(Quality, TheEnginesThreadMeasuresWhileItIsIdle) {
  EngineConfig config = TinyConfig(Model(), "int4");
  config.quality_sample_rate = 1;
  Engine engine(config);
  std::binary_semaphore ended(0);
  engine.Start([&](std::span<const RequestOutput> outputs) {
    for (const RequestOutput& output : outputs) {
      if (output.finish != FinishReason::kNone) ended.release();
    }
  });
  for (int i = 0; i < 3; ++i) {
    engine.Add({.id = std::to_string(i), .prompt = {1, 2, 3}, .sampling = Greedy(60)});
    ended.acquire();
  }
  while (engine.Stats().quality.requests < 3) std::this_thread::yield();
  EXPECT_THROW(engine.MeasureQuality(), InputError);
  engine.Stop(true);
  EXPECT_EQ(engine.Stats().quality.tokens, 3 * 60);
}

TEST(Quality, SkipsTooManyAndTooLongSequences) {
  EngineConfig config = TinyConfig(Model(), "int8");
  config.quality_sample_rate = 1;
  config.max_num_seqs = 40;
  Engine engine(config);
  for (int i = 0; i < 20; ++i) engine.Add({.id = std::to_string(i), .prompt = {1, 2}, .sampling = Greedy(3)});
  RunAll(engine);
  EXPECT_EQ(engine.Stats().quality.pending, static_cast<int64_t>(QualityMonitor::kMaxPending));
  EXPECT_EQ(engine.Stats().quality.skipped, 20 - static_cast<int64_t>(QualityMonitor::kMaxPending));
  engine.Add({.id = "a", .prompt = {1, 2}, .sampling = Greedy(3)});
  engine.Abort("a");
  RunAll(engine);
  EXPECT_EQ(engine.Stats().quality.skipped, 20 - static_cast<int64_t>(QualityMonitor::kMaxPending)) << "not served";
  EXPECT_THROW(
      {
        config.quality_sample_rate = 1.5;
        const Engine wrong(config);
      },
      InputError);
}

TEST(Divergence, IsNaNForInvalidRows) {
  const std::vector<float> row = {1, 2, 3};
  const std::vector<float> bad = {1, NAN, 3};
  EXPECT_EQ(runner::KlDivergence(row, row), 0);
  EXPECT_TRUE(std::isnan(runner::KlDivergence(row, bad)));
  EXPECT_TRUE(std::isnan(runner::KlDivergence(bad, row)));
  const std::vector<float> shifted = {11, 12, 13};
  EXPECT_NEAR(runner::KlDivergence(row, shifted), 0, 1e-6);
}

TEST(ZeroScales, AreCountedWhereTheFormatHasBlockScales) {
  const TinyModel silent({.key_gain = 0});  // all keys are zero
  const auto layer = [&](const TinyModel& model, const char* format) {
    EngineConfig config = TinyConfig(model, format);
    config.page_size = 32;
    config.max_num_batched_tokens = 64;
    Engine engine(config);
    std::mt19937_64 random(2);
    RunOne(engine, {.id = "a", .prompt = RandomTokens(random, 64), .sampling = Greedy(1)});
    return engine.Stats().layers[0];
  };
  // 64 tokens x 2 heads of 32 channels.
  const LayerStats rows = layer(silent, "int8_g32");
  EXPECT_EQ(rows.k_blocks, 128);
  EXPECT_EQ(rows.k_zero_blocks, 128);
  EXPECT_EQ(rows.v_blocks, 128);
  EXPECT_EQ(rows.v_zero_blocks, 0);
  const LayerStats closed = layer(silent, "int5_g32");  // pages that are exact while they are open
  EXPECT_EQ(closed.k_blocks, 128);
  EXPECT_EQ(closed.k_zero_blocks, 128);
  EXPECT_EQ(closed.v_zero_blocks, 0);
  EXPECT_EQ(layer(Model(), "int8_g32").k_zero_blocks, 0);
  for (const char* format : {"bf16", "fp8_e4m3", "kivi4", "mxfp8"}) {
    EXPECT_EQ(layer(silent, format).k_blocks, 0) << format;
  }
}

TEST(Profile, CountsEveryOperationAndChangesNothing) {
  EngineConfig config = TinyConfig(Model(), "int4");
  Engine plain(config);
  config.profile = true;
  Engine engine(config);
  std::mt19937_64 random(2);
  const Request request{.id = "a", .prompt = RandomTokens(random, 30), .sampling = Greedy(10)};
  EXPECT_EQ(RunOne(engine, request).tokens, RunOne(plain, request).tokens);
  std::map<std::string, ProfileRow> rows;
  double seconds = 0;
  for (const ProfileRow& row : engine.Stats().profile) {
    rows[row.name] = row;
    seconds += row.seconds;
  }
  const EngineStats stats = engine.Stats();
  EXPECT_TRUE(plain.Stats().profile.empty());
  EXPECT_EQ(stats.steps, 10);
  for (const char* name : {"linear q_proj|k_proj|v_proj", "linear o_proj", "linear gate_proj|up_proj",
                           "linear down_proj", "append", "attention", "activation", "rope"}) {
    EXPECT_EQ(rows[name].calls, 2 * stats.steps) << name << ": once per layer and step";
    EXPECT_GT(rows[name].seconds, 0) << name;
  }
  EXPECT_EQ(rows["linear lm_head"].calls, stats.steps);
  EXPECT_EQ(rows["attention plan"].calls, stats.steps);
  EXPECT_EQ(rows["norm"].calls, 5 * stats.steps);
  EXPECT_LE(seconds, stats.seconds_forward);
  EXPECT_LE(stats.seconds_forward + stats.seconds_schedule + stats.seconds_masks + stats.seconds_sample,
            stats.seconds_total);
}

}  // namespace
}  // namespace kvanta::engine
