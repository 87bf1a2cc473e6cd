// States of recurrent layers: which pages have a record, where prefix hits end, what the prefix cache keeps.
#include <gtest/gtest.h>

#include <numeric>

#include "cache/sequence_cache.h"

namespace kvanta::cache {
namespace {

constexpr int kStatePage = 16;
constexpr int kStateGroup = 1;  // the KV cache group of recurrent layers

// A layer of attention and a recurrent one.
formats::CacheLayout HybridLayout(int64_t page_bytes, int64_t state_bytes) {
  formats::CacheLayout layout;
  layout.page_size = kStatePage;
  layout.layers.resize(2);
  layout.layers[1].group = kStateGroup;
  layout.layers[1].state_bytes = state_bytes;
  layout.groups = {{.page_bytes = page_bytes}, {.page_bytes = state_bytes}};
  layout.page_bytes = page_bytes;
  layout.state_bytes = state_bytes;
  return layout;
}

struct HybridCache {
  explicit HybridCache(int64_t budget = 1 << 20, int64_t state_bytes = 4096)
      : layout(HybridLayout(1024, state_bytes)),
        manager(Cpu(), layout, {}, {.budget_bytes = budget, .poison_unused = true}, true) {}
  formats::CacheLayout layout;
  KvCacheManager manager;
  PagePool& pool = manager.pool;
  PrefixCache& prefix = *manager.prefix;

  bool HasState(const SequenceCache& sequence, int64_t page) const {
    return sequence.Pages()[kStateGroup][page].quantized != kNoPage;
  }
  int64_t States() const { return pool.UsedPages(kStateGroup, PageKind::kQuantized); }
};

std::vector<int32_t> AscendingTokens(int64_t count) {
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 7);
  return tokens;
}

// Runs a prompt in steps of `step` tokens.
void Compute(SequenceCache& sequence, const std::vector<int32_t>& tokens, int64_t step = 4 * kStatePage) {
  const auto end = static_cast<int64_t>(tokens.size());
  while (sequence.Length() < end) {
    ASSERT_TRUE(sequence.Reserve(std::min(step, end - sequence.Length())));
    sequence.Commit(tokens);
  }
}

TEST(RecurrentState, IsAtTheLastTokenOfAStepAlone) {
  HybridCache world;
  SequenceCache sequence(world.manager, "", Sharing::kPrivate);
  ASSERT_TRUE(sequence.Reserve(3 * kStatePage + 5));
  for (int page = 0; page < 3; ++page) EXPECT_FALSE(world.HasState(sequence, page)) << page;
  EXPECT_TRUE(world.HasState(sequence, 3));
  const auto tokens = AscendingTokens(6 * kStatePage);
  sequence.Commit(tokens);
  ASSERT_TRUE(sequence.Reserve(1));
  EXPECT_EQ(world.States(), 1) << "a token of an open page updates its record";
  sequence.Commit(tokens);
  ASSERT_TRUE(sequence.Reserve(kStatePage));  // from page 3 to page 4
  EXPECT_TRUE(world.HasState(sequence, 3)) << "the state before the step";
  EXPECT_TRUE(world.HasState(sequence, 4));
  sequence.Commit(tokens);
  EXPECT_EQ(world.States(), 1);
  EXPECT_EQ(world.manager.spec.groups[kStateGroup].MaxBytes(100 * kStatePage, 9), 2 * 4096);
}

TEST(RecurrentState, PrefixHitsEndAtTheEndOfThePrompt) {
  HybridCache world;
  const auto tokens = AscendingTokens(5 * kStatePage + 3);
  SequenceCache first(world.manager, "");
  EXPECT_EQ(first.MatchPrefix(tokens), 0);
  Compute(first, tokens, 6 * kStatePage);
  SequenceCache second(world.manager, "");
  EXPECT_EQ(second.MatchPrefix(tokens), 5 * kStatePage);
  EXPECT_TRUE(world.HasState(second, 4));
  for (int page = 0; page < 4; ++page) EXPECT_FALSE(world.HasState(second, page)) << page;
}

TEST(RecurrentState, ABranchGetsAStateWithItsSecondPrompt) {
  HybridCache world;
  auto tokens = AscendingTokens(7 * kStatePage);
  SequenceCache first(world.manager, "");
  first.MatchPrefix(tokens);
  Compute(first, tokens, 7 * kStatePage);
  // Another prompt leaves the path after three pages, where no step ended.
  for (int64_t i = 3 * kStatePage; i < std::ssize(tokens); ++i) tokens[static_cast<size_t>(i)] += 1000;
  SequenceCache second(world.manager, "");
  EXPECT_EQ(second.MatchPrefix(tokens), 0);
  Compute(second, tokens, 7 * kStatePage);
  for (int64_t i = 3 * kStatePage; i < std::ssize(tokens); ++i) tokens[static_cast<size_t>(i)] += 1000;
  SequenceCache third(world.manager, "");
  EXPECT_EQ(third.MatchPrefix(tokens), 3 * kStatePage);
}

TEST(RecurrentState, OfGeneratedTokensTheLastIsKept) {
  HybridCache world;
  const auto tokens = AscendingTokens(12 * kStatePage);
  const auto prompt = AscendingTokens(2 * kStatePage + 1);
  {
    SequenceCache sequence(world.manager, "");
    sequence.MatchPrefix(prompt);
    Compute(sequence, prompt);
    while (sequence.Length() < 6 * kStatePage + 3) {
      ASSERT_TRUE(sequence.Reserve(1));
      sequence.Commit(tokens);
    }
    sequence.Finish(tokens);
  }
  EXPECT_EQ(world.States(), 2) << "at the end of the prompt, and at the last full page";
  SequenceCache next(world.manager, "");
  EXPECT_EQ(next.MatchPrefix(tokens), 6 * kStatePage);
}

TEST(RecurrentState, EveryIntervalKeepsAState) {
  HybridCache world;
  const int64_t interval = world.manager.spec.groups[kStateGroup].snapshot_interval;
  EXPECT_EQ(interval, 8) << "states of four pages' size: the least interval";
  EXPECT_EQ(HybridCache(1 << 20, 20 * 1024).manager.spec.groups[kStateGroup].snapshot_interval, 20);
  auto tokens = AscendingTokens(20 * kStatePage);
  SequenceCache first(world.manager, "");
  first.MatchPrefix(tokens);
  Compute(first, tokens, 20 * kStatePage);
  tokens[static_cast<size_t>(17 * kStatePage)] += 1000;
  SequenceCache second(world.manager, "");
  EXPECT_EQ(second.MatchPrefix(tokens), 16 * kStatePage);
}

TEST(RecurrentState, SnapshotsAreNotWorthAFailure) {
  HybridCache world(3 * 4096 + 20 * 1024);  // two states of the first sequence, one more, and pages
  const auto tokens = AscendingTokens(17 * kStatePage);
  SequenceCache sequence(world.manager, "");
  sequence.MatchPrefix(tokens);
  Compute(sequence, tokens, 3 * kStatePage);
  EXPECT_EQ(sequence.Length(), 17 * kStatePage);
  sequence.Clear();
  while (world.prefix.EvictOne()) {
  }
  EXPECT_EQ(world.pool.UsedBytes(), 0);
}

}  // namespace
}  // namespace kvanta::cache
