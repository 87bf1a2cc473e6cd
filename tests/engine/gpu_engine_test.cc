// The whole engine on a GPU, emulated and (where there is one) real: logits near the CPU's, batch-invariant, with one
// wait per step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "emulated/gpus.h"
#include "emulated/guarded_device.h"
#include "engine/engine_impl.h"
#include "engine/requests.h"
#include "engine/scripted_proposer.h"
#include "kvanta/error.h"
#include "runner/divergence.h"

namespace kvanta::engine {
namespace {

using ::testing::HasSubstr;

// Heads of 64, as common models have at least.
const TinyModel& GpuModel() {
  static const TinyModel model({.heads = 2, .kv_heads = 1, .head_dim = 64, .intermediate_size = 96, .key_gain = 1.0F});
  return model;
}

// A MoE model whose prompts have more rows than an expert's tile, and its decode steps fewer.
const TinyModel& ExpertModel() {
  static const TinyModel model({.rank = 64, .experts = 6});
  return model;
}

class GpuEngineTest : public testing::GpuTestBase, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override { Start(GetParam()); }

  static EngineConfig Config(const std::string& kv_cache_dtype, const std::string& weight_dtype = "auto",
                             bool experts = false) {
    const bool latents =
        formats::Find(KvScheme::Parse(kv_cache_dtype).k.format).latents == formats::MlaSupport::kRequired;
    EngineConfig config = TinyConfig(latents ? LatentModel() : GpuModel(), kv_cache_dtype);
    if (experts) config.model = ExpertModel().Path();
    config.dtype = "bfloat16";
    config.weight_dtype = weight_dtype;
    config.page_size = 32;
    return config;
  }
  std::unique_ptr<Engine::Impl> Make(EngineConfig config) const {
    config.device = "cuda";
    return std::make_unique<Engine::Impl>(LoadComponents(std::move(config), gpu_));
  }
};

INSTANTIATE_TEST_SUITE_P(Gpus, GpuEngineTest, ::testing::ValuesIn(testing::Gpus()),
                         [](const auto& param) { return param.param; });

// Checks that bits depend neither on chunks nor on prefix hits.
void ExpectBatchInvariance(Engine::Impl& engine, std::span<const int32_t> tokens, std::span<const float> logits) {
  const std::vector<float> chunked = ColdLogits(engine, tokens, 7);
  ASSERT_EQ(std::memcmp(chunked.data(), logits.data(), logits.size_bytes()), 0) << "chunks of 7";
  std::vector<float> again(logits.begin(), logits.end());
  ASSERT_EQ(engine.Logits(tokens, 32, again, true), 0);
  ASSERT_EQ(engine.Logits(tokens, 0, again, true), 32) << "whole pages of the prefix";
  ASSERT_EQ(std::memcmp(again.data(), logits.data(), logits.size_bytes()), 0) << "after a cached prefix";
}

TEST_P(GpuEngineTest, LogitsAreBatchInvariantAndNearTheCpus) {
  std::mt19937_64 random(5);
  const std::vector<int32_t> tokens = RandomTokens(random, 45);
  struct Case {
    const char* kv;
    const char* weights;
    bool experts = false;
  };
  constexpr Case kCases[] = {{"int4", "int8"},
#ifndef KVANTA_SANITIZED
                             {"bf16", "auto"},      {"bf16", "int4"},     {"nvfp4+exact=open", "auto"},
                             {"mla_fp8", "auto"},   {"mla_int4", "int8"}, {"mla_fp8", "auto", true},
                             {"bf16", "int4", true}
#endif
  };
  for (const auto& [kv, weights, experts] : kCases) {
    SCOPED_TRACE(std::string(kv) + " with weights " + weights + (experts ? " of experts" : ""));
    EngineConfig on_cpu = Config(kv, weights, experts);
    on_cpu.isa = "portable";  // operands of fp8 are not rounded to bf16
    Engine cpu(on_cpu);
    const std::unique_ptr<Engine::Impl> engine = Make(Config(kv, weights, experts));
    const std::vector<float> expected = ColdLogits(cpu, tokens), logits = ColdLogits(*engine, tokens);
    const size_t vocab = expected.size() / tokens.size();
    double sum = 0;
    for (size_t row = 0; row < tokens.size(); ++row) {
      const double kl = runner::KlDivergence(std::span(expected).subspan(row * vocab, vocab),
                                             std::span(logits).subspan(row * vocab, vocab));
      EXPECT_LT(kl, 1e-2) << "row " << row;  // a wrong layer gives about 1
      sum += kl;
    }
    // Both round activations, each in its own way; of 8-bit weights the CPU does it to 127 steps.
    EXPECT_LT(sum / static_cast<double>(tokens.size()), 1e-3);
    ExpectBatchInvariance(*engine, tokens, logits);
  }
}

// Tokens depend neither on the batch nor on whether they are sampled on the host or on the GPU.
TEST_P(GpuEngineTest, RequestsGetTheirTokensWhateverTheBatch) {
  const std::unique_ptr<Engine::Impl> engine = Make(Config("int4"));
  std::mt19937_64 random(6);
  std::vector<Request> requests;
  for (int i = 0; i < 5; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 3 + 17 * i), .sampling = Greedy(6)};
    if (i > 0) {  // greedy; all of the vocabulary; a part of it; and what only the host does
      request.sampling.temperature = 0.7F + 0.2F * static_cast<float>(i);
      request.sampling.seed = 40 + i;
    }
    if (i == 2) request.sampling.min_p = 0.05F;
    if (i == 3) request.sampling.top_p = 0.8F;
    if (i == 2) request.sampling.top_k = 11;
    if (i == 4) request.sampling.repetition_penalty = 1.3F;
    requests.push_back(request);
  }
  for (const Request& request : requests) engine->Add(request);
  std::map<std::string, Collected> together = RunAll(*engine);
  for (Request request : requests) {
    engine->ResetPrefixCache();
    request.sampling.logprobs = 0;  // the host then reads the logits, and chooses
    const Collected alone = RunOne(*engine, request);
    EXPECT_EQ(alone.tokens, together[request.id].tokens) << request.id;
    EXPECT_EQ(alone.tokens.size(), 6U) << alone.error;
    if (request.id != "0") continue;
    for (size_t i = 0; i < alone.tokens.size(); ++i) EXPECT_EQ(alone.logprobs[i][0].rank, 1);
  }
  EXPECT_EQ(engine->Stats().device, "cuda");
  EXPECT_GT(engine->Stats().layers[0].k_values, 0);
}

// Rows of a draft are sampled on the GPU, too, with the random numbers of their positions.
TEST_P(GpuEngineTest, DraftsChangeNoToken) {
  const std::unique_ptr<Engine::Impl> plain = Make(Config("int4"));
  EngineConfig config = Config("int4");
  config.device = "cuda";
  const SpeculatingEngine speculating(LoadComponents(config, gpu_), 0.3);
  std::mt19937_64 random(12);
  for (int i = 0; i < 4; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 20 + 3 * i), .sampling = Greedy(20)};
    request.sampling.temperature = i % 2 == 0 ? 0.0F : 0.9F;
    if (i == 3) request.sampling.frequency_penalty = 0.5F;  // on the host
    const Collected want = RunOne(*plain, request);
    speculating.Teach(request, want);
    EXPECT_EQ(RunOne(*speculating.engine, request).tokens, want.tokens) << i;
  }
  EXPECT_GT(speculating.engine->Stats().accepted_tokens, 20);
}

// A draft model samples there, too; the model itself is always right.
TEST_P(GpuEngineTest, ADraftModelChangesNoToken) {
  const std::unique_ptr<Engine::Impl> plain = Make(Config("int8"));
  EngineConfig config = Config("int8");
  config.device = "cuda";
  config.speculative_config = fmt::format(R"({{"model": "{}"}})", config.model);
  EngineComponents components = LoadComponents(config, gpu_);
  components.draft_cost = 0.0F;
  Engine::Impl speculating(std::move(components));
  std::mt19937_64 random(13);
  for (int i = 0; i < 3; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 20 + 3 * i), .sampling = Greedy(16)};
    request.sampling.temperature = i == 0 ? 0.0F : 0.9F;
    if (i == 2) request.sampling.frequency_penalty = 0.5F;  // on the host
    EXPECT_EQ(RunOne(speculating, request).tokens, RunOne(*plain, request).tokens) << i;
  }
  EXPECT_GT(speculating.Stats().accepted_tokens, 20);
  EXPECT_EQ(speculating.Stats().accepted_tokens, speculating.Stats().draft_tokens);
}

// Kernels of a decode step for each layer: norm and packing; q, k and v; rope, K and V into the cache, pages that
// close; attention and packing; output; norm and packing; gate, up, activation and packing; down.
TEST_P(GpuEngineTest, LaunchesOfALayer) {
  if (!emulated_) GTEST_SKIP() << "counted by the emulation";
  static const TinyModel more_layers({.heads = 2, .kv_heads = 1, .head_dim = 64, .intermediate_size = 96, .layers = 4});
  const auto& device = dynamic_cast<testing::GuardedDevice&>(gpu_->device());
  const auto launches = [&](const std::string& format, const std::string& weights, const std::string& model) {
    EngineConfig config = Config(format, weights);
    config.model = model;
    const std::unique_ptr<Engine::Impl> engine = Make(std::move(config));
    engine->Add({.id = "", .prompt = {1, 2, 3}, .sampling = Greedy(4)});
    std::vector<RequestOutput> outputs;
    for (int step = 0; step < 2; ++step) engine->Step(outputs);  // the prompt, a step that is captured
    const int64_t before = device.Launches();
    engine->Step(outputs);
    return device.Launches() - before;
  };
  struct Case {
    const char *format, *weights;
    int expected;
  };
  constexpr Case kCases[] = {
      {"bf16", "auto", 8}, {"int4", "int8", 8}, {"kivi4", "auto", 8}, {"k=int8,v=int4", "int4", 9}};  // of two encoders
  for (const auto& [format, weights, expected] : kCases) {
    const int64_t more = launches(format, weights, more_layers.Path());
    EXPECT_EQ(more - launches(format, weights, GpuModel().Path()), 2 * expected) << format << ", " << weights;
  }
}

// All tokens, and the first log-probability of requests that asked for it.
std::map<std::string, std::pair<std::vector<int32_t>, std::vector<float>>> Served(Engine::Impl& engine,
                                                                                  int64_t& max_running) {
  std::map<std::string, std::pair<std::vector<int32_t>, std::vector<float>>> served;
  std::vector<RequestOutput> outputs;
  std::mt19937_64 random(8);
  int next = 0;
  const auto add = [&](int count) {
    for (int i = 0; i < count; ++i, ++next) {
      Request request{.id = std::to_string(next),
                      .prompt = RandomTokens(random, next < 3 ? 1 + next : 19 + next),
                      .sampling = Greedy(4 + 5 * next % 11)};
      request.sampling.temperature = next % 3 == 0 ? 0.0F : 1.5F;
      request.sampling.seed = next;
      if (next % 2 == 0) request.sampling.logprobs = 0;
      engine.Add(request);
    }
  };
  add(3);
  for (int step = 0; engine.Step(outputs); ++step) {
    if (step == 2) add(9);
    if (step == 8) add(2);
    max_running = std::max(max_running, engine.Stats().running);
    for (const RequestOutput& output : outputs) {
      auto& [tokens, logprobs] = served[output.id];
      EXPECT_NE(output.finish, FinishReason::kError) << output.error;
      tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
      for (const auto& entry : output.logprobs) logprobs.push_back(entry[0].logprob);
    }
  }
  return served;
}

// Batches grow and shrink, contexts grow, pages close, requests end: a replay that depends on the captured step fails.
TEST_P(GpuEngineTest, GraphsChangeNoBit) {
#ifdef KVANTA_SANITIZED  // after faults of memory, in emulation that is slow as it is
  const std::vector<std::string> formats = {"int4"};
#else
  const std::vector<std::string> formats = {"int4", "kivi4", "mla_int4"};  // kivi4's pages are encoded when they close
#endif
  for (const std::string& format : formats) {
    SCOPED_TRACE(format);
    EngineConfig config = Config(format, "auto", format == "mla_int4");
    config.max_num_seqs = 12;
    int64_t limit = 0;
    const auto graphs = Served(*Make(config), limit);
    EXPECT_GT(limit, 8);
    if (emulated_) {
      EXPECT_GT(dynamic_cast<const testing::GuardedDevice&>(gpu_->device()).Replays(), 10);
    }
    config.enforce_eager = true;
    EXPECT_EQ(graphs, Served(*Make(config), limit));
    EXPECT_EQ(graphs.size(), 14U);
  }
}

// A GPU leaves rows with too many candidates to the host.
TEST_P(GpuEngineTest, FlatDistributionsAreSampledOnTheHost) {
  const TinyModel wide({.vocab = 3000, .heads = 2, .kv_heads = 1, .head_dim = 64, .layers = 1});
  EngineConfig config = Config("bf16");
  config.model = wide.Path();
  const std::unique_ptr<Engine::Impl> engine = Make(config);
  Request request{.id = "a", .prompt = {1, 2, 3}, .sampling = Greedy(4)};
  request.sampling.temperature = 50;
  request.sampling.top_p = 0.95F;
  request.sampling.seed = 3;
  const Collected drawn = RunOne(*engine, request);
  EXPECT_EQ(drawn.tokens.size(), 4U) << drawn.error;
  request.sampling.logprobs = 0;  // the host chooses
  EXPECT_EQ(drawn.tokens, RunOne(*engine, request).tokens);
}

TEST_P(GpuEngineTest, ADecodeStepWaitsOnce) {
  if (!emulated_) GTEST_SKIP() << "waits are counted by the emulation";
  const std::unique_ptr<Engine::Impl> engine = Make(Config("int4"));
  const auto& device = dynamic_cast<testing::GuardedDevice&>(gpu_->device());
  for (const char* id : {"a", "b"}) engine->Add({.id = id, .prompt = {5, 6, 7}, .sampling = Greedy(5)});
  std::vector<RequestOutput> outputs;
  ASSERT_TRUE(engine->Step(outputs));
  for (int step = 0; step < 3; ++step) {
    const int64_t before = device.Synchronizations();
    ASSERT_TRUE(engine->Step(outputs));
    EXPECT_EQ(device.Synchronizations() - before,
              2);  // for the tokens, and, when nothing runs any more, for the counts
  }
}

// After a failed launch the results are those of an earlier step: no request may get them.
TEST_P(GpuEngineTest, AFailedLaunchEndsTheRequestsOfItsStep) {
  if (!emulated_) GTEST_SKIP() << "a GPU's launches are not made to fail";
  const std::unique_ptr<Engine::Impl> engine = Make(Config("bf16"));
  auto& device = dynamic_cast<testing::GuardedDevice&>(gpu_->device());
  engine->Add({.id = "a", .prompt = {5, 6, 7}, .sampling = Greedy(5)});
  std::vector<RequestOutput> outputs;
  ASSERT_TRUE(engine->Step(outputs));
  ASSERT_EQ(outputs.at(0).finish, FinishReason::kNone);
  device.Fail("a kernel failed");
  ASSERT_TRUE(engine->Step(outputs));
  device.Fail("");
  ASSERT_EQ(outputs.size(), 1U);
  EXPECT_EQ(outputs[0].finish, FinishReason::kError);
  EXPECT_TRUE(outputs[0].tokens.empty());
  EXPECT_THAT(outputs[0].error, HasSubstr("a kernel failed"));
}

// Features that read keys, values and pages on the host.
TEST_P(GpuEngineTest, ScalesStatisticsPagesAndQualityMatchTheCpus) {
  std::mt19937_64 random(7);
  const std::vector<int32_t> tokens = RandomTokens(random, 40);
  EngineConfig config = Config("int8");
  config.quality_sample_rate = 1;
  config.calculate_kv_scales = true;
  const std::unique_ptr<Engine::Impl> engine = Make(config);
  Engine cpu(Config("int8"));
  const KvStatistics statistics = engine->CollectStatistics(tokens, {}), expected = cpu.CollectStatistics(tokens);
  for (size_t i = 0; i < expected.amax.size(); ++i) EXPECT_NEAR(statistics.amax[i], expected.amax[i], 0.05);
  const Collected got = RunOne(*engine, {.id = "a", .prompt = tokens, .sampling = Greedy(3)});
  EXPECT_EQ(got.tokens.size(), 3U) << got.error;
  EXPECT_GT(engine->ExportPage(tokens, 0, 0).size(), size_t{32} * 2 * 64 * 2);
  while (engine->MeasureQuality()) {
  }
  EXPECT_EQ(engine->Stats().quality.requests, 1);
  EXPECT_LT(engine->Stats().quality.kl_max, 0.1);
}

TEST_P(GpuEngineTest, AnF32ModelIsComparedWithAnF32Cache) {
  for (const char* format : {"int8", "mla_fp8"}) {
    EngineConfig config = Config(format);
    config.dtype = "float32";
    config.quality_sample_rate = 1;
    const std::unique_ptr<Engine::Impl> engine = Make(config);
    const Collected got = RunOne(*engine, {.id = "a", .prompt = {3, 4, 5, 6}, .sampling = Greedy(3)});
    EXPECT_EQ(got.tokens.size(), 3U) << got.error;
    while (engine->MeasureQuality()) {
    }
    EXPECT_EQ(engine->Stats().quality.requests, 1);
    EXPECT_EQ(engine->Stats().quality.skipped, 0);
    EXPECT_GT(engine->Stats().quality.kl_max, 0);
    EXPECT_LT(engine->Stats().quality.kl_max, 0.1);
  }
}

TEST_P(GpuEngineTest, NonFiniteLogitsEndTheirRequest) {
  const TinyModel overflowing({.heads = 2, .kv_heads = 1, .head_dim = 64, .layers = 1}, 3e38F);
  EngineConfig config = Config("bf16");
  config.model = overflowing.Path();
  const std::unique_ptr<Engine::Impl> engine = Make(config);
  const Collected got = RunOne(*engine, {.id = "a", .prompt = {1, 2, 3}, .sampling = Greedy(3)});
  EXPECT_EQ(got.finish, FinishReason::kError);
  EXPECT_THAT(got.error, HasSubstr("not finite"));
}

TEST_P(GpuEngineTest, RefusesUnsupportedOptions) {
  const auto error = [&](EngineConfig config) -> std::string {
    try {
      Make(std::move(config));
    } catch (const InputError& refused) {
      return refused.what();
    }
    return "";
  };
  EngineConfig profiled = Config("bf16");
  profiled.profile = true;
  EXPECT_THAT(error(profiled), HasSubstr("profile is not supported"));
  EngineConfig isa = Config("bf16");
  isa.isa = "portable";
  EXPECT_THAT(error(isa), HasSubstr("isa 'portable' selects a CPU unit"));
}

// Without a GPU the engine says what is missing.
TEST(GpuEngine, NamesWhatIsMissing) {
  if (kernels::MissingForCuda().empty()) GTEST_SKIP() << "this machine has a GPU";
  EngineConfig config = TinyConfig(GpuModel(), "bf16");
  config.device = "cuda";
  try {
    const Engine engine(config);
    FAIL() << "an engine without a GPU";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), HasSubstr("device cuda: " + kernels::MissingForCuda() + "; there are: auto, cpu"));
  }
}

TEST_P(GpuEngineTest, EmbeddingsAreBatchInvariantAndNearTheCpus) {
  std::mt19937_64 random(12);
  std::vector<Request> requests;
  for (const auto& [id, tokens, type] :
       {std::tuple("mean", 45, PoolingType::kMean), std::tuple("last", 40, PoolingType::kLast),
        std::tuple("one", 1, PoolingType::kLast)}) {
    requests.push_back({.id = id,
                        .prompt = RandomTokens(random, tokens),
                        .pooling = PoolingParams{.pooling_type = type, .normalize = false}});
  }
  Engine cpu(Config("int4"));
  const std::unique_ptr<Engine::Impl> alone = Make(Config("int4")), together = Make(Config("int4"));
  together->Add({.id = "text", .prompt = RandomTokens(random, 5), .sampling = Greedy(3)});
  for (const Request& request : requests) together->Add(request);
  const auto found = RunAll(*together);
  EXPECT_EQ(found.at("text").tokens.size(), 3u);
  for (const Request& request : requests) {
    const std::vector<float> expected = RunOne(*alone, request).embedding, near = RunOne(cpu, request).embedding;
    const std::vector<float>& got = found.at(request.id).embedding;
    ASSERT_EQ(got.size(), 64u) << request.id << ": " << found.at(request.id).error;
    ASSERT_EQ(expected.size(), got.size());
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof(float)), 0) << request.id;
    double error = 0, size = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - static_cast<double>(near[i]), 2);
      size += std::pow(static_cast<double>(near[i]), 2);
    }
    EXPECT_LT(std::sqrt(error / size), 0.05) << request.id;  // another row gives about 1
  }
}

}  // namespace
}  // namespace kvanta::engine
