// Drafts of a step: how many tokens each decoding sequence gets, and what is committed of them.
#include "engine/spec_decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <vector>

#include "base/device.h"
#include "scheduler/scheduler_world.h"

namespace kvanta::engine {
namespace {

using testing::Each;
using testing::ElementsAre;

// Proposes one token as often as it may.
class OneToken final : public DraftProposer {
 public:
  std::unique_ptr<State> MakeState(const std::string& /*salt*/) override { return std::make_unique<State>(); }
  void Propose(std::span<Item> items) override {
    for (const Item& item : items) item.draft.insert(item.draft.end(), static_cast<size_t>(item.count), 5);
    if (fails) throw std::bad_alloc();
  }

  bool fails = false;
};

struct AnyToken final : TokenConstraint {};

struct SpecDecodeTest : testing::Test {
  // Adds a request that decodes: in the next step, it has `tokens` tokens, of which one was generated.
  RequestState& Decoding(int64_t tokens, int max_tokens = 50) {
    Request request{.id = "a", .prompt = std::vector<int32_t>(static_cast<size_t>(tokens - 1), 3)};
    request.sampling.max_tokens = max_tokens;
    requests.push_back(std::make_shared<RequestState>(std::move(request), std::vector<int32_t>(), 1, world.cache));
    world.Run(*requests.back());
    return *requests.back();
  }
  std::vector<int> DraftsOfAStep() {
    for (const auto& request : requests) {
      if (request->Remaining() == 0) request->tokens.push_back(5);
    }
    const auto scheduled = world.scheduler.Schedule();
    chunks.assign(scheduled.begin(), scheduled.end());
    spec_decode.Propose(chunks, world.scheduler);
    std::vector<int> drafts;
    for (const scheduler::Chunk& chunk : chunks) drafts.push_back(chunk.drafts);
    return drafts;
  }

  scheduler::World world{scheduler::Config(16, 20), 1 << 20};
  OneToken proposer;
  SpecDecode spec_decode{proposer, {.num_speculative_tokens = 4, .max_model_len = 40, .target_weight_bytes = 1}};
  std::vector<std::shared_ptr<RequestState>> requests;
  std::vector<scheduler::Chunk> chunks;
};

TEST_F(SpecDecodeTest, DraftsLeaveThePageOpenAndEndBeforeTheLimits) {
  Decoding(5);
  Decoding(14);    // near the end of its page
  Decoding(16);    // at the end of its page
  Decoding(6, 4);  // near max_tokens
  Decoding(38);    // near max_model_len
  EXPECT_THAT(DraftsOfAStep(), ElementsAre(4, 1, 0, 2, 1));
}

TEST_F(SpecDecodeTest, PromptsAndConstrainedRequestsGetNone) {
  Decoding(5).request.constraint = std::make_shared<AnyToken>();
  Decoding(5).tokens.insert(requests.back()->tokens.end(), {5, 5});  // two tokens to compute
  EXPECT_THAT(DraftsOfAStep(), Each(0));
}

// 20 tokens fit the step.
TEST_F(SpecDecodeTest, SequencesShareTheRowsOfAStep) {
  for (int i = 0; i < 6; ++i) Decoding(5);
  EXPECT_THAT(DraftsOfAStep(), ElementsAre(3, 3, 2, 2, 2, 2));
  world.scheduler.Commit();
  for (int i = 0; i < 4; ++i) Decoding(5);
  EXPECT_THAT(DraftsOfAStep(), Each(1));
}

TEST_F(SpecDecodeTest, AStepWorksWithoutMemoryForDrafts) {
  Decoding(5);
  proposer.fails = true;
  EXPECT_THAT(DraftsOfAStep(), ElementsAre(0));
}

TEST_F(SpecDecodeTest, CommitsWhatVerificationAccepted) {
  RequestState& request = Decoding(5);
  ASSERT_THAT(DraftsOfAStep(), ElementsAre(4));
  world.scheduler.Commit();
  RequestOutput output;
  output.tokens = {5, 5, 9};  // two draft tokens, and the one that was sampled instead of the third
  spec_decode.Commit(request, output, 4, 0);
  EXPECT_EQ(request.pages.Length(), 7);
  EXPECT_EQ(output.draft_tokens, 4);
  EXPECT_EQ(output.accepted_tokens, 2);
  EngineStats stats;
  spec_decode.Count(stats);
  EXPECT_EQ(stats.drafts, 1);
  EXPECT_EQ(stats.draft_tokens, 4);
  EXPECT_EQ(stats.accepted_tokens, 2);
  EXPECT_THAT(stats.accepted_per_position, ElementsAre(1, 1, 0, 0));
}

}  // namespace
}  // namespace kvanta::engine
