// Ranks of tensor parallelism with an emulated GPU each, as threads of this process: the bits of one GPU, whether their
// gathers are launches, which graphs hold, or pass through the host.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "emulated/cuda_gpu.h"
#include "emulated/guarded_device.h"
#include "engine/engine_impl.h"
#include "engine/ranks.h"
#include "engine/requests.h"
#include "kernels/cuda/gpu_communicator.h"
#include "kvanta/rank_lost_error.h"
#include "parallel/gloo_communicator.h"
#include "parallel/rank_files.h"
#include "weights/temp_folder.h"

namespace kvanta::engine {
namespace {

struct GpuRanksCase {
  const char* name;
  TinyShape model;
  const char* kv;
  const char* weights;
  int ranks;
  bool nccl;
};

// Rank 0, and threads of the others, which end with it.
struct GpuRanks {
  GpuRanks(EngineConfig config, int ranks, const std::string& nccl_library) {
    config.tensor_parallel_size = ranks;
    config.rank_folder = folder.Path();
    config.on_warning = [this](const std::string& text) { warnings.push_back(text); };
    config.start_ranks = [this, config, nccl_library] {
      for (int rank = 1; rank < config.tensor_parallel_size; ++rank) {
        EngineConfig other = config;
        other.rank = rank;
        other.start_ranks = nullptr;
        threads.emplace_back([other, nccl_library] {
          try {
            RunRank(other, testing::MakeEmulatedGpu({.nccl_library = nccl_library}));
          } catch (const std::exception&) {  // reported to rank 0, which says so
          }
        });
      }
    };
    gpu = testing::MakeEmulatedGpu({.nccl_library = nccl_library});
    engine = std::make_unique<Engine::Impl>(LoadComponents(config, gpu));
  }

  weights::TempFolder folder;
  std::vector<std::string> warnings;
  std::vector<std::jthread> threads;
  std::shared_ptr<kernels::CudaContext> gpu;
  std::unique_ptr<Engine::Impl> engine;
};

std::vector<Request> Requests() {
  std::mt19937_64 random(6);
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    Request request{.id = std::to_string(i), .prompt = RandomTokens(random, 3 + 9 * i), .sampling = Greedy(5)};
    if (i > 0) {
      request.sampling.temperature = 0.7F + 0.2F * static_cast<float>(i);
      request.sampling.seed = 40 + i;
    }
    if (i == 3) request.sampling.repetition_penalty = 1.3F;  // on the host
    requests.push_back(request);
  }
  return requests;
}

std::map<std::string, Collected> Answer(Engine::Impl& engine) {
  for (const Request& request : Requests()) engine.Add(request);
  return RunAll(engine);
}

class GpuRanksTest : public ::testing::TestWithParam<GpuRanksCase> {
 protected:
  void SetUp() override {
    if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) GTEST_SKIP() << missing;
  }
};

TEST_P(GpuRanksTest, HaveTheBitsOfOneGpu) {
  const GpuRanksCase& param = GetParam();
  const TinyModel model(param.model);
  EngineConfig config = TinyConfig(model, param.kv);
  config.device = "cuda";
  config.dtype = "bfloat16";
  config.weight_dtype = param.weights;
  config.page_size = 32;
  std::mt19937_64 random(5);
  const std::vector<int32_t> tokens = RandomTokens(random, 45);
  Engine::Impl alone(LoadComponents(config, testing::MakeEmulatedGpu()));
  const std::vector<float> expected = ColdLogits(alone, tokens);
  std::map<std::string, Collected> answers = Answer(alone);

  GpuRanks ranks(config, param.ranks, param.nccl ? KVANTA_FAKE_NCCL : "");
  const std::vector<float> whole = ColdLogits(*ranks.engine, tokens), chunks = ColdLogits(*ranks.engine, tokens, 7);
  ASSERT_EQ(std::memcmp(whole.data(), expected.data(), expected.size() * sizeof(float)), 0);
  ASSERT_EQ(std::memcmp(chunks.data(), expected.data(), expected.size() * sizeof(float)), 0) << "chunks of 7";
  const auto& device = dynamic_cast<const testing::GuardedDevice&>(ranks.gpu->device());
  const int64_t before = device.Replays();
  for (auto& [id, found] : Answer(*ranks.engine)) {
    EXPECT_EQ(found.tokens, answers[id].tokens) << id << found.error;
    EXPECT_EQ(found.tokens.size(), 5U) << id;
  }
  EXPECT_EQ(device.Replays() > before, param.nccl) << "graphs hold gathers of the GPU alone";
  EXPECT_TRUE(ranks.warnings.empty()) << ranks.warnings.front();
}

INSTANTIATE_TEST_SUITE_P(
    Divisions, GpuRanksTest,
    ::testing::Values(
        GpuRanksCase{"Nccl2", {}, "int4", "auto", 2, true}, GpuRanksCase{"Host2", {}, "int4", "int8", 2, false},
        // Parts of different sizes, and more ranks than KV heads.
        GpuRanksCase{"Nccl4", {.vocab = 97, .kv_heads = 1, .intermediate_size = 90}, "int8", "int8", 4, true},
        GpuRanksCase{"Host4", {.vocab = 97, .kv_heads = 1, .intermediate_size = 90}, "kivi4", "auto", 4, false},
        GpuRanksCase{"NcclExperts", {.rank = 64, .experts = 6}, "mla_int4", "auto", 2, true},
        GpuRanksCase{"HostExperts", {.intermediate_size = 70, .rank = 64, .experts = 6}, "mla_fp8", "int4", 4, false}),
    [](const auto& param) { return std::string(param.param.name); });

// Gathers run until all ranks take part: a wait for them ends with the report of a loss, or by itself.
TEST(GpuRanksOfOneMachine, WaitsEndWithALostRank) {
  if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) GTEST_SKIP() << missing;
  const TinyModel model;
  EngineConfig config = TinyConfig(model, "bf16");
  config.device = "cuda";
  config.distributed_timeout_seconds = 20;
  const std::vector<int32_t> tokens(9, 3);
  for (const bool reported : {true, false}) {
    GpuRanks ranks(config, 2, KVANTA_FAKE_NCCL);
    ColdLogits(*ranks.engine, tokens);
    std::this_thread::sleep_for(std::chrono::milliseconds(150));  // longer than between two looks
    auto& device = dynamic_cast<testing::GuardedDevice&>(ranks.gpu->device());
    if (reported) {
      parallel::ReportRankLoss(ranks.folder.Path(), 1, {.rank = 1, .reason = "its process was ended by SIGKILL"});
    } else {
      device.SetWaited(std::chrono::seconds(21));
    }
    try {
      ColdLogits(*ranks.engine, tokens);
      ADD_FAILURE() << "the loss was not noticed";
    } catch (const RankLostError& error) {
      EXPECT_EQ(error.Rank(), 1);
      EXPECT_NE(error.Reason().find(reported ? "ended by SIGKILL" : "within 20 seconds"), std::string::npos)
          << error.Reason();
    }
  }
}

// A launch waits for a rank that does not take part in its gather, as while a GPU's queue is full: a thread ends it.
TEST(GpuRanksOfOneMachine, LaunchesEndWithALostRank) {
  if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) GTEST_SKIP() << missing;
  for (const bool reported : {true, false}) {
    const weights::TempFolder folder;
    const auto join = [&](int rank, const std::shared_ptr<kernels::CudaContext>& gpu) {
      return kernels::MakeGpuCommunicator(
          {.gpu = gpu,
           .host = parallel::JoinGloo({.rank = rank, .size = 2, .folder = folder.Path(), .identity = "model = a\n"}),
           .timeout = std::chrono::seconds(reported ? 60 : 1),
           .on_warning = nullptr});
    };
    std::latch ended(1);
    const std::jthread other([&] {
      const auto ranks = join(1, testing::MakeEmulatedGpu({.nccl_library = KVANTA_FAKE_NCCL}));
      ended.wait();
    });
    const std::shared_ptr<kernels::CudaContext> gpu = testing::MakeEmulatedGpu({.nccl_library = KVANTA_FAKE_NCCL});
    const auto ranks = join(0, gpu);
    const std::jthread reporter([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      if (reported)
        parallel::ReportRankLoss(folder.Path(), 1, {.rank = 1, .reason = "its process was ended by SIGKILL"});
    });
    const Buffer columns = gpu->device().Allocate(8 * sizeof(float));
    ranks->AllGatherColumns(columns.as<float>(), 1, ranks->PartitionOf(8), columns.as<float>());
    try {
      ranks->Check();
      ADD_FAILURE() << "the loss was not noticed";
    } catch (const RankLostError& error) {
      EXPECT_EQ(error.Rank(), 1);
      EXPECT_NE(error.Reason().find(reported ? "ended by SIGKILL" : "within 1 seconds"), std::string::npos)
          << error.Reason();
    }
    ended.count_down();
  }
}

TEST(GpuRanksOfOneMachine, WithoutNcclSayHowToGetIt) {
  if (const std::string missing = parallel::MissingForGloo(); !missing.empty()) GTEST_SKIP() << missing;
  const TinyModel model;
  EngineConfig config = TinyConfig(model, "bf16");
  config.device = "cuda";
  const GpuRanks ranks(config, 2, "libnccl-missing.so.2");
  ASSERT_EQ(ranks.warnings.size(), 1U);
  EXPECT_NE(ranks.warnings[0].find("libnccl-missing.so.2"), std::string::npos) << ranks.warnings[0];
  EXPECT_NE(ranks.warnings[0].find("install Debian's libnccl2"), std::string::npos);
  EXPECT_NE(ranks.warnings[0].find("through the host's memory"), std::string::npos);
}

}  // namespace
}  // namespace kvanta::engine
