// Pipelines of ranks: several steps are in flight while their requests end or are preempted. Ranks are threads here.
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <thread>

#include "engine/engine_impl.h"
#include "engine/format_cases.h"
#include "engine/scripted_proposer.h"
#include "kvanta/error.h"
#include "parallel/gloo_communicator.h"
#include "weights/temp_folder.h"

namespace kvanta::engine {
namespace {

// Rank 0, whose drafts are wrong with some probability, and threads of the others, which end with it.
struct Pipeline {
  Pipeline(EngineConfig config, int ranks, double error_rate) {
    config.pipeline_parallel_size = ranks;
    config.rank_folder = folder.Path();
    config.start_ranks = [this, config] {
      for (int rank = 1; rank < config.pipeline_parallel_size; ++rank) {
        EngineConfig other = config;
        other.rank = rank;
        other.start_ranks = nullptr;
        threads.emplace_back([other] { RunRank(other); });
      }
    };
    EngineComponents components = LoadComponents(config);
    auto scripted = std::make_unique<ScriptedProposer>(error_rate);
    proposer = scripted.get();
    components.proposer = std::move(scripted);
    components.num_speculative_tokens = 4;
    engine = std::make_unique<Engine::Impl>(std::move(components));
  }

  weights::TempFolder folder;
  std::vector<std::jthread> threads;
  ScriptedProposer* proposer = nullptr;
  std::unique_ptr<Engine::Impl> engine;
};

struct PipelineCase {
  FormatCase format;
  int ranks;
};

class PipelineTest : public testing::TestWithParam<PipelineCase> {
 protected:
  void SetUp() override {
    if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) GTEST_SKIP() << missing;
  }
};

Request RandomTextOrEmbedding(std::mt19937_64& random, const std::vector<std::vector<int32_t>>& stems, int number) {
  Request request = RandomRequest(random, stems, number);
  if (number % 5 == 0) request.sampling.stop_token_ids = {static_cast<int32_t>(random() % 96)};
  if (number % 7 != 3) return request;
  request.pooling = PoolingParams{.pooling_type = number % 2 == 0 ? PoolingType::kLast : PoolingType::kMean};
  request.sampling = {};
  return request;
}

// Texts with drafts and embeddings in a cache too small for them, aborts, timeouts, resets, and logits between two
// steps: every request ends once, with the bits of one alone unless it was ended, and every step counts once.
TEST_P(PipelineTest, RequestsHaveTheirBitsAndEndOnce) {
  const auto& [format, ranks] = GetParam();
  const TinyModel model({.layers = 4, .sliding_window = format.windowed ? 40 : 0});
  EngineConfig config = TinyConfig(model, format.format);
  EngineConfig alone_config = config;
  alone_config.enable_prefix_caching = false;
  alone_config.max_num_seqs = 1;
  Engine alone(alone_config);
  std::mt19937_64 random(static_cast<uint64_t>(ranks));
  std::vector<std::vector<int32_t>> stems;
  for (int i = 0; i < 3; ++i) stems.push_back(RandomTokens(random, 3 * config.page_size));
  const CachePlan plan = PlanCacheBytes(config);
  config.kv_cache_memory_bytes = plan.sequence_bytes + plan.page_bytes + 2 * plan.exact_page_bytes;
  if (ranks % 2 == 0) config.max_step_ms = 100;
  Pipeline pipeline(config, ranks, 0.3);
  Engine::Impl& engine = *pipeline.engine;
  std::vector<Request> requests;
  std::map<std::string, Collected> want, got;
  for (int i = 0; i < 40; ++i) {
    requests.push_back(RandomTextOrEmbedding(random, stems, i));
    const Request& request = requests.back();
    want[request.id] = RunOne(alone, request);
    std::vector<int32_t> sequence = request.prompt;
    sequence.insert(sequence.end(), want[request.id].tokens.begin(), want[request.id].tokens.end());
    pipeline.proposer->Add(std::move(sequence));
  }
  std::map<std::string, int> ends;
  std::vector<RequestOutput> outputs;
  std::vector<float> logits(30 * 96);
  for (size_t added = 0;;) {
    while (added < requests.size() && random() % 3 != 0) {
      engine.Add(requests[added++]);
      if (random() % 12 == 0) engine.Abort(requests[random() % added].id, "gone");
    }
    const bool worked = engine.Step(outputs);
    Collect(outputs, got);
    for (const RequestOutput& output : outputs) {
      EXPECT_EQ(ends[output.id], 0) << output.id << " has ended";
      ends[output.id] += output.finish == FinishReason::kNone ? 0 : 1;
    }
    if (!worked && added == requests.size()) break;
    if (random() % 40 == 0) engine.ResetPrefixCache();
    if (random() % 40 != 0) continue;
    try {
      engine.Logits(std::span(stems[0]).first(30), 7, logits, false);
    } catch (const ResourceError&) {  // no page is free
    }
  }
  for (const Request& request : requests) {
    EXPECT_EQ(ends[request.id], 1) << request.id;
    if (got[request.id].finish != FinishReason::kAbort) ExpectEqual(got[request.id], want[request.id], request.id);
  }
  const EngineStats stats = engine.Stats();
  EXPECT_GT(stats.finished_abort, 0);
  EXPECT_LT(stats.finished_abort, 20);
  EXPECT_GT(stats.accepted_tokens, 50);
  EXPECT_EQ(std::accumulate(stats.step_tokens.begin(), stats.step_tokens.end(), int64_t{0}), stats.steps);
  engine.ResetPrefixCache();
  EXPECT_EQ(engine.Stats().cache_used_bytes, 0) << "references leaked";
}

INSTANTIATE_TEST_SUITE_P(Formats, PipelineTest,
                         testing::Values(PipelineCase{{"int4", false}, 2}, PipelineCase{{"bf16", true}, 3},
                                         PipelineCase{{"int4+exact=2", false}, 3}, PipelineCase{{"int8", false}, 4}));

}  // namespace
}  // namespace kvanta::engine
