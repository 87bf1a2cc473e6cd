#include "cache/sequence_cache.h"

#include <gtest/gtest.h>

#include <list>
#include <random>

namespace kvanta::cache {
namespace {

constexpr int kPage = 16;

// Layers by (exact_pages, sink_pages).
using Layers = std::vector<std::pair<int, int>>;

formats::CacheLayout Layout(const Layers& layers) {
  formats::CacheLayout layout;
  layout.page_size = kPage;
  layout.page_bytes = 1024;
  for (const auto& [exact, sink] : layers) {
    formats::LayerScheme layer;
    layer.exact_open = exact > 0;
    layer.exact_pages = exact;
    layer.sink_pages = sink;
    if (exact > 0) layout.exact_page_bytes += 2048;
    layout.layers.push_back(layer);
  }
  return layout;
}

struct World {
  explicit World(const Layers& layers, int64_t budget = 1 << 20, int64_t window = 0)
      : layout(Layout(layers)),
        demand(layout, window),
        store(Cpu(), layout, {.budget_bytes = budget, .poison_unused = true}),
        tree(store, kPage) {}
  formats::CacheLayout layout;
  PageRequirements demand;
  PagePool store;
  PrefixTree tree;
};

std::vector<int32_t> Tokens(int64_t count, int32_t value = 5) {
  return std::vector<int32_t>(static_cast<size_t>(count), value);
}

// The rule of block_table.h, written down independently of PageRequirements.
void ExpectRecords(const World& world, const SequenceCache& sequence, int64_t start, int64_t end) {
  for (int64_t page = 0; page * kPage < end; ++page) {
    bool quantized = false;
    bool exact = false;
    const bool active = (page + 1) * kPage > start;
    const bool closed = (page + 1) * kPage <= end;
    for (const auto& layer : world.layout.layers) {
      quantized |= !layer.exact_open || (closed && page >= layer.sink_pages);
      exact |= layer.exact_open && (active || page > start / kPage - layer.exact_pages || page < layer.sink_pages);
    }
    EXPECT_EQ(sequence.Pages()[page].quantized != kNoPage, quantized)
        << "page " << page << " of " << start << ".." << end;
    EXPECT_EQ(sequence.Pages()[page].exact != kNoPage, exact) << "page " << page << " of " << start << ".." << end;
  }
}

TEST(SequenceCache, HasTheRecordsThatThePageRuleNeeds) {
  const std::vector<Layers> layouts = {{{0, 0}}, {{1, 0}}, {{1, 1}},         {{1, 1}, {0, 0}}, {{1, 0}, {1, 1}},
                                       {{2, 0}}, {{2, 1}}, {{2, 0}, {1, 3}}, {{0, 0}, {2, 2}}};
  std::mt19937 random(3);
  for (const auto& layers : layouts) {
    World world(layers);
    for (int round = 0; round < 50; ++round) {
      SequenceCache sequence(world.store, round % 2 == 0 ? nullptr : &world.tree, world.demand, std::to_string(round));
      while (sequence.Length() < 5 * kPage) {
        const int64_t start = sequence.Length();
        const auto count = static_cast<int64_t>(random() % (2 * kPage) + 1);
        const int64_t before = world.store.UsedBytes();
        const int64_t bytes = sequence.BytesToReserve(count);
        ASSERT_TRUE(sequence.Reserve(count));
        EXPECT_EQ(world.store.UsedBytes() - before, bytes);
        EXPECT_LE(world.store.UsedBytes() - world.tree.EvictableBytes(),
                  world.demand.MaxBytes(start + count, (start % kPage + count + kPage - 1) / kPage));
        ExpectRecords(world, sequence, start, start + count);
        sequence.Commit(Tokens(start + count));
      }
    }
    world.tree.Clear();
    EXPECT_EQ(world.store.UsedBytes(), 0);
  }
}

TEST(SequenceCache, ReservesAllOrNothing) {
  World world({{1, 0}}, 4 * 1024 + 2048);
  SequenceCache sequence(world.store, nullptr, world.demand, "");
  EXPECT_FALSE(sequence.Reserve(3 * kPage));  // 3 quantized and 3 exact records
  EXPECT_EQ(world.store.UsedBytes(), 0);
  EXPECT_EQ(sequence.PageCount(), 0);
  EXPECT_TRUE(sequence.Reserve(2 * kPage));
  EXPECT_EQ(world.store.UsedBytes(), 6 * 1024);
  sequence.Commit(Tokens(2 * kPage));
  EXPECT_EQ(world.store.UsedBytes(), 2 * 1024) << "the exact records of closed pages must go";
  sequence.Clear();
  EXPECT_EQ(world.store.UsedBytes(), 0);
}

TEST(SequenceCache, SharesClosedPagesAndTheSink) {
  World world({{1, 1}});
  const auto tokens = Tokens(3 * kPage + 3);
  SequenceCache first(world.store, &world.tree, world.demand, "");
  EXPECT_EQ(first.MatchPrefix(tokens), 0);
  ASSERT_TRUE(first.Reserve(3 * kPage + 3));
  first.Commit(tokens);
  EXPECT_EQ(world.tree.Pages(), 3);
  SequenceCache second(world.store, &world.tree, world.demand, "");
  EXPECT_EQ(second.MatchPrefix(tokens), 3 * kPage);
  EXPECT_EQ(second.Pages()[0].exact, first.Pages()[0].exact);
  EXPECT_NE(second.Pages()[0].exact, kNoPage);
  EXPECT_EQ(second.Pages()[0].quantized, kNoPage);
  EXPECT_EQ(second.Pages()[2], first.Pages()[2]);
  SequenceCache third(world.store, &world.tree, world.demand, "");
  EXPECT_EQ(third.MatchPrefix(std::span(tokens).first(3 * kPage)), 2 * kPage) << "one token must be left to compute";
}

// exact=2: a hit may end only where the last page's exact record is, at a sequence's end, or, once learned, at a
// branch.
TEST(SequenceCache, HitsEndWhereTheExactRecordIs) {
  World world({{2, 0}});
  const auto long_tokens = Tokens(4 * kPage + 3);
  auto branched = long_tokens;  // leaves after 2 pages
  for (size_t i = 2 * kPage; i < branched.size(); ++i) branched[i] = 9;
  const auto run = [&](const std::vector<int32_t>& tokens) {
    SequenceCache sequence(world.store, &world.tree, world.demand, "");
    const int64_t hit = sequence.MatchPrefix(tokens);
    if (hit > 0) {
      EXPECT_NE(sequence.Pages()[hit / kPage - 1].exact, kNoPage);
    }
    for (int64_t page = 0; page + 1 < hit / kPage; ++page) EXPECT_EQ(sequence.Pages()[page].exact, kNoPage);
    EXPECT_TRUE(sequence.Reserve(static_cast<int64_t>(tokens.size()) - hit));
    sequence.Commit(tokens);
    sequence.Finish(tokens);
    return hit;
  };
  EXPECT_EQ(run(long_tokens), 0);
  EXPECT_EQ(run(long_tokens), 4 * kPage) << "the end of the first is a place to go on";
  EXPECT_EQ(run(branched), 0) << "nothing exact at the branch yet";
  EXPECT_EQ(run(branched), 4 * kPage);
  auto third = long_tokens;
  for (size_t i = 2 * kPage; i < third.size(); ++i) third[i] = 7;
  EXPECT_EQ(run(third), 2 * kPage) << "the branch was learned";
  EXPECT_EQ(world.store.UsedBytes(), world.tree.EvictableBytes());
  world.tree.Clear();
  EXPECT_EQ(world.store.UsedBytes(), 0);
}

TEST(SequenceCache, AdoptsTheTreesEqualPage) {
  World world({{0, 0}});
  const auto tokens = Tokens(kPage);
  SequenceCache first(world.store, &world.tree, world.demand, "");
  SequenceCache second(world.store, &world.tree, world.demand, "");
  ASSERT_TRUE(first.Reserve(kPage));
  ASSERT_TRUE(second.Reserve(kPage));
  EXPECT_EQ(world.store.UsedPages(PageKind::kQuantized), 2);
  first.Commit(tokens);
  second.Commit(tokens);
  EXPECT_EQ(world.store.UsedPages(PageKind::kQuantized), 1);
  EXPECT_EQ(first.Pages()[0], second.Pages()[0]);
}

TEST(SequenceCache, FreesPagesBehindTheWindow) {
  World world({{1, 0}}, 1 << 20, 2 * kPage);
  SequenceCache sequence(world.store, nullptr, world.demand, "");
  for (int64_t length = 1; length <= 10 * kPage; ++length) {
    ASSERT_TRUE(sequence.Reserve(1));
    sequence.Commit(Tokens(length));
    // The next query stands at `length` and sees (length - window, length].
    for (int64_t page = 0; page < sequence.PageCount(); ++page) {
      const bool visible = (page + 1) * kPage - 1 > length - 2 * kPage;
      EXPECT_EQ(sequence.Pages()[page] != PageRef{}, visible) << "page " << page << " at " << length;
    }
  }
  EXPECT_LE(world.store.UsedPages(PageKind::kQuantized), 2);
}

TEST(SequenceCache, EvictsFromTheTreeWhenItMust) {
  World world({{0, 0}}, 4 * 1024);
  for (int32_t value = 0; value < 20; ++value) {
    SequenceCache sequence(world.store, &world.tree, world.demand, "");
    const auto tokens = Tokens(2 * kPage, value);
    ASSERT_TRUE(sequence.Reserve(2 * kPage));
    sequence.Commit(tokens);
  }
  EXPECT_EQ(world.tree.Pages(), 4);
}

TEST(SequenceCache, LeaksNothingUnderRandomTraffic) {
  std::mt19937 random(11);
  for (int round = 0; round < 30; ++round) {
    World world({{1, round % 2}, {round % 3 == 0, 0}}, 40000 + static_cast<int64_t>(random() % 40000),
                round % 5 == 0 ? 40 : 0);
    struct Live {
      std::unique_ptr<SequenceCache> cache;
      std::vector<int32_t> tokens;
    };
    std::list<Live> live;
    for (int step = 0; step < 500; ++step) {
      if (live.size() < 6 && random() % 3 == 0) {
        Live fresh{
            std::make_unique<SequenceCache>(world.store, &world.tree, world.demand, random() % 2 == 0 ? "" : "salt"),
            {}};
        fresh.tokens = Tokens(static_cast<int64_t>(random() % 80 + 1), static_cast<int32_t>(random() % 2));
        fresh.cache->MatchPrefix(fresh.tokens);
        live.push_back(std::move(fresh));
      }
      for (auto it = live.begin(); it != live.end();) {
        auto count = static_cast<int64_t>(it->tokens.size()) - it->cache->Length();
        if (count == 0) {
          it->tokens.push_back(static_cast<int32_t>(random() % 2));
          count = 1;
        }
        if (random() % 20 == 0 || !it->cache->Reserve(count)) {
          it = live.erase(it);
          continue;
        }
        it->cache->Commit(it->tokens);
        ++it;
      }
      ASSERT_LE(world.store.UsedBytes(), world.store.BudgetBytes());
    }
    live.clear();
    world.tree.Clear();
    EXPECT_EQ(world.store.UsedBytes(), 0);
  }
}

}  // namespace
}  // namespace kvanta::cache
