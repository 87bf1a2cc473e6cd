// States that are rounded at a grid: where steps end, which records there are, and that a hit continues with the bits
// of the run that made it.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "cache/sequence_cache.h"

namespace kvanta::cache {
namespace {

constexpr int kStatePageSize = 16, kGrid = 64;  // tokens
constexpr int kRoundedGroup = 1;                // the KV cache group of recurrent layers

struct RoundedCache {
  explicit RoundedCache(formats::StateCode code, int64_t budget = 1 << 20)
      : layout(formats::PlanCache(
            std::vector(3, KvScheme::Parse("bf16")),
            {{2, 16}, {.kv_heads = 0, .head_dim = 16, .state = shape}, {.kv_heads = 0, .head_dim = 16, .state = shape}},
            kStatePageSize, {0, kRoundedGroup, kRoundedGroup}, {code, kGrid})),
        manager(Cpu(), layout, {}, {.budget_bytes = budget, .poison_unused = true}, true) {}

  formats::StateShape shape{4, 16, 16, 24};
  formats::CacheLayout layout;
  KvCacheManager manager;

  int64_t UsedRecords(PageKind kind) const { return manager.pool.UsedPages(kRoundedGroup, kind); }
  // The working state of the page of the last token.
  float* State(const SequenceCache& sequence) const {
    const PageId page = sequence.Pages()[kRoundedGroup][(sequence.Length() - 1) / kStatePageSize].exact;
    return reinterpret_cast<float*>(manager.pool.Record(kRoundedGroup, PageKind::kExact, page));
  }
  int64_t StateFloats() const { return manager.pool.RecordBytes(kRoundedGroup, PageKind::kExact) / 4; }
};

std::vector<int32_t> PositionTokens(int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 7);
  return tokens;
}

// Computes up to token `end` in steps of at most `step` tokens, with states that depend on positions alone.
void ComputeRounded(RoundedCache& world, SequenceCache& sequence, const std::vector<int32_t>& tokens, int64_t end,
                    int64_t step) {
  while (sequence.Length() < end) {
    const int64_t count = sequence.StepTokens(std::min(step, end - sequence.Length()));
    const int64_t after = sequence.Length() + count;
    std::vector<float> before(static_cast<size_t>(world.StateFloats()));
    ASSERT_TRUE(sequence.Reserve(count));
    if (sequence.Length() > 0) std::copy_n(world.State(sequence), before.size(), before.begin());
    const PageId page = sequence.Pages()[kRoundedGroup][(after - 1) / kStatePageSize].exact;
    auto* state = reinterpret_cast<float*>(world.manager.pool.Record(kRoundedGroup, PageKind::kExact, page));
    for (size_t i = 0; i < before.size(); ++i) {
      state[i] = before[i] * 0.9F + static_cast<float>((after * 37 + static_cast<int64_t>(i) * 11) % 101) / 50 - 1;
    }
    sequence.Commit(tokens);
  }
}

class RoundedState : public ::testing::TestWithParam<formats::StateCode> {};

TEST_P(RoundedState, StepsEndAtTheGrid) {
  RoundedCache world(GetParam());
  SequenceCache sequence(world.manager, "");
  EXPECT_EQ(sequence.StepTokens(1000), kGrid);
  const auto tokens = PositionTokens(200);
  ComputeRounded(world, sequence, tokens, 40, 40);
  EXPECT_EQ(sequence.StepTokens(1000), kGrid - 40);
  EXPECT_EQ(sequence.StepTokens(3), 3);
}

TEST_P(RoundedState, AHitContinuesWithTheBitsOfTheRun) {
  RoundedCache world(GetParam());
  const auto tokens = PositionTokens(3 * kGrid + 20);
  SequenceCache first(world.manager, "");
  first.MatchPrefix(tokens);
  ComputeRounded(world, first, tokens, 3 * kGrid, kGrid);
  const std::vector<float> rounded(world.State(first), world.State(first) + world.StateFloats());
  first.Finish(tokens);
  EXPECT_EQ(world.UsedRecords(PageKind::kExact), 0) << "working states are not cached";

  SequenceCache second(world.manager, "");
  ASSERT_EQ(second.MatchPrefix(tokens), 3 * kGrid);
  const int64_t state_bytes = world.manager.pool.RecordBytes(kRoundedGroup, PageKind::kExact);
  EXPECT_GE(second.BytesToReserve(1), 2 * state_bytes) << "the state that is read, and the one that is written";
  ASSERT_TRUE(second.Reserve(1));
  // Bytes that align a layer's state belong to none.
  for (const formats::LayerScheme& layer : world.layout.layers) {
    if (!layer.IsRecurrent()) continue;
    const int64_t at = layer.exact_offset / 4;
    EXPECT_TRUE(std::equal(&rounded[static_cast<size_t>(at)], &rounded[static_cast<size_t>(at + layer.state.Floats())],
                           world.State(second) + at));
  }
}

TEST_P(RoundedState, OnlyTheLastSnapshotOfARunIsKept) {
  RoundedCache world(GetParam());
  const auto tokens = PositionTokens(7 * kGrid + 20);
  SequenceCache sequence(world.manager, "");
  sequence.MatchPrefix(tokens);
  ComputeRounded(world, sequence, tokens, std::ssize(tokens), kGrid);
  EXPECT_EQ(world.UsedRecords(PageKind::kExact), 1);
  // The interval of 8 pages keeps those at 128, 256 and 384 tokens, the end of the prompt that at 448.
  EXPECT_EQ(world.manager.spec.groups[kRoundedGroup].snapshot_interval, 8);
  EXPECT_EQ(world.UsedRecords(PageKind::kQuantized), 4);
}

TEST_P(RoundedState, RoundsWithoutMemoryForASnapshot) {
  RoundedCache plenty(GetParam()), tight(GetParam(), 5 * 9 * 1024);
  const auto tokens = PositionTokens(2 * kGrid);
  std::vector<float> states[2];
  for (RoundedCache* world : {&plenty, &tight}) {
    SequenceCache sequence(world->manager, "", world == &plenty ? Sharing::kShared : Sharing::kPrivate);
    ComputeRounded(*world, sequence, tokens, 2 * kGrid, kGrid);
    const float* state = world->State(sequence);
    states[world == &plenty ? 0 : 1].assign(state, state + world->layout.layers[1].state.Floats());
  }
  EXPECT_EQ(tight.UsedRecords(PageKind::kQuantized), 0);
  EXPECT_EQ(states[0], states[1]);
}

INSTANTIATE_TEST_SUITE_P(Codes, RoundedState,
                         ::testing::Values(formats::StateCode::kBf16, formats::StateCode::kInt8,
                                           formats::StateCode::kInt4),
                         [](const auto& tested) { return std::string(formats::Name(tested.param)); });

}  // namespace
}  // namespace kvanta::cache
