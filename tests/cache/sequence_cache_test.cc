#include "cache/sequence_cache.h"

#include <gtest/gtest.h>

#include <list>
#include <random>

namespace kvanta::cache {
namespace {

constexpr int kPage = 16;

// Layers as (exact_pages, sink_pages): in one group, or in one group each if they have different visibility.
using Layers = std::vector<std::pair<int, int>>;

formats::CacheLayout Layout(const Layers& layers, bool apart) {
  formats::CacheLayout layout;
  layout.page_size = kPage;
  layout.groups.resize(apart ? layers.size() : 1);
  for (const auto& [exact, sink] : layers) {
    formats::LayerScheme layer;
    layer.group = apart ? static_cast<int>(layout.layers.size()) : 0;
    layer.exact_open = exact > 0;
    layer.exact_pages = exact;
    layer.sink_pages = sink;
    formats::GroupBytes& group = layout.groups[static_cast<size_t>(layer.group)];
    group.page_bytes = 1024;
    if (exact > 0) group.exact_page_bytes += 2048;
    layout.layers.push_back(layer);
  }
  for (const formats::GroupBytes& group : layout.groups) {
    layout.page_bytes += group.page_bytes;
    layout.exact_page_bytes += group.exact_page_bytes;
  }
  return layout;
}

struct World {
  explicit World(const Layers& layers, int64_t budget = 1 << 20, int window = 0)
      : World(layers, std::vector<Visibility>(layers.size(), SlidingWindow(window)), budget, false) {}
  World(const Layers& layers, const std::vector<Visibility>& visibility, int64_t budget = 1 << 20, bool apart = true)
      : layout(Layout(layers, apart)),
        manager(Cpu(), layout, visibility, {.budget_bytes = budget, .poison_unused = true}, true) {}
  formats::CacheLayout layout;
  KvCacheManager manager;
  PagePool& pool = manager.pool;
  PrefixCache& prefix = *manager.prefix;
};

std::vector<int32_t> Tokens(int64_t count, int32_t value = 5) {
  return std::vector<int32_t>(static_cast<size_t>(count), value);
}

// Checks a sequence's records against the rule of kv_cache_spec.h, implemented independently of KvCacheGroup.
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
    EXPECT_EQ(sequence.Pages()[0][page].quantized != kNoPage, quantized)
        << "page " << page << " of " << start << ".." << end;
    EXPECT_EQ(sequence.Pages()[0][page].exact != kNoPage, exact) << "page " << page << " of " << start << ".." << end;
  }
}

// Pages dealt to ranks: page j of a sequence to rank j mod 4, a rank's bytes are those of the plan, and admission by
// these leaves no rank without memory.
TEST(SequenceCache, DealsPagesToRanks) {
  const formats::CacheLayout layout = Layout({{1, 1}}, false);
  for (const int ranks : {2, 4}) {
    const KvCacheSpec spec(layout, {}, ranks), whole(layout);
    EXPECT_EQ(spec.BytesPerToken(100 * kPage) * ranks, whole.BytesPerToken(100 * kPage));
    const int64_t budget = 3 * spec.MaxBytes(21 * kPage);
    KvCacheManager manager(Cpu(), layout, {}, {.budget_bytes = budget, .poison_unused = true, .ranks = ranks}, true);
    EXPECT_EQ(manager.AvailableBytes(), budget);
    std::list<SequenceCache> sequences;
    for (int i = 0; i < 3; ++i) {
      SequenceCache& sequence = sequences.emplace_back(manager, std::to_string(i));
      const int64_t available = manager.AvailableBytes();
      for (int page = 0; page < 21; ++page) {
        ASSERT_TRUE(sequence.Reserve(kPage)) << "page " << page << " of sequence " << i;
        EXPECT_LE(available - manager.AvailableBytes(), spec.MaxBytes((page + 1) * kPage));
        sequence.Commit(Tokens((page + 1) * kPage, i));
      }
      for (int64_t page = 0; page < 21; ++page) {
        const PageRef& ref = sequence.Pages()[0][page];
        for (const PageKind kind : {PageKind::kQuantized, PageKind::kExact}) {
          if (ref.Of(kind) == kNoPage) continue;
          EXPECT_TRUE(manager.pool.IsOfRank(0, kind, ref.Of(kind), static_cast<int>(page % ranks)));
        }
      }
    }
    // Another one takes the memory of those that have ended, on every rank.
    for (SequenceCache& sequence : sequences) sequence.Finish(Tokens(21 * kPage, 0));
    SequenceCache last(manager, "last");
    EXPECT_EQ(manager.AvailableBytes(), budget);
    ASSERT_TRUE(last.Reserve(20 * kPage));
  }
}

TEST(SequenceCache, HasTheRecordsThatThePageRuleNeeds) {
  const std::vector<Layers> layouts = {{{0, 0}}, {{1, 0}}, {{1, 1}},         {{1, 1}, {0, 0}}, {{1, 0}, {1, 1}},
                                       {{2, 0}}, {{2, 1}}, {{2, 0}, {1, 3}}, {{0, 0}, {2, 2}}};
  std::mt19937 random(3);
  for (const auto& layers : layouts) {
    World world(layers);
    for (int round = 0; round < 50; ++round) {
      SequenceCache sequence(world.manager, std::to_string(round),
                             round % 2 == 0 ? Sharing::kPrivate : Sharing::kShared);
      while (sequence.Length() < 5 * kPage) {
        const int64_t start = sequence.Length();
        const auto count = static_cast<int64_t>(random() % (2 * kPage) + 1);
        const int64_t before = world.pool.UsedBytes();
        const int64_t bytes = sequence.BytesToReserve(count);
        ASSERT_TRUE(sequence.Reserve(count));
        EXPECT_EQ(world.pool.UsedBytes() - before, bytes);
        EXPECT_LE(world.pool.UsedBytes() - world.pool.EvictableBytes(),
                  world.manager.spec.MaxBytes(start + count, (start % kPage + count + kPage - 1) / kPage));
        ExpectRecords(world, sequence, start, start + count);
        sequence.Commit(Tokens(start + count));
      }
    }
    world.prefix.Clear();
    EXPECT_EQ(world.pool.UsedBytes(), 0);
  }
}

TEST(SequenceCache, ReservesAllOrNothing) {
  World world({{1, 0}}, 4 * 1024 + 2048);
  SequenceCache sequence(world.manager, "", Sharing::kPrivate);
  EXPECT_FALSE(sequence.Reserve(3 * kPage));  // 3 quantized and 3 exact records
  EXPECT_EQ(world.pool.UsedBytes(), 0);
  EXPECT_EQ(sequence.PageCount(), 0);
  EXPECT_TRUE(sequence.Reserve(2 * kPage));
  EXPECT_EQ(world.pool.UsedBytes(), 6 * 1024);
  sequence.Commit(Tokens(2 * kPage));
  EXPECT_EQ(world.pool.UsedBytes(), 2 * 1024) << "the exact records of closed pages must go";
  sequence.Clear();
  EXPECT_EQ(world.pool.UsedBytes(), 0);
}

TEST(SequenceCache, SharesClosedPagesAndTheSink) {
  World world({{1, 1}});
  const auto tokens = Tokens(3 * kPage + 3);
  SequenceCache first(world.manager, "");
  EXPECT_EQ(first.MatchPrefix(tokens), 0);
  ASSERT_TRUE(first.Reserve(3 * kPage + 3));
  first.Commit(tokens);
  EXPECT_EQ(world.prefix.Pages(), 3);
  SequenceCache second(world.manager, "");
  EXPECT_EQ(second.MatchPrefix(tokens), 3 * kPage);
  EXPECT_EQ(second.Pages()[0][0].exact, first.Pages()[0][0].exact);
  EXPECT_NE(second.Pages()[0][0].exact, kNoPage);
  EXPECT_EQ(second.Pages()[0][0].quantized, kNoPage);
  EXPECT_EQ(second.Pages()[0][2], first.Pages()[0][2]);
  SequenceCache third(world.manager, "");
  EXPECT_EQ(third.MatchPrefix(std::span(tokens).first(3 * kPage)), 2 * kPage) << "one token must be left to compute";
}

// exact=2: a hit ends only at a page whose exact record is cached: at a sequence's end or, after a first miss, at a
// branch.
TEST(SequenceCache, HitsEndWhereTheExactRecordIs) {
  World world({{2, 0}});
  const auto long_tokens = Tokens(4 * kPage + 3);
  auto branched = long_tokens;  // diverges after 2 pages
  for (size_t i = 2 * kPage; i < branched.size(); ++i) branched[i] = 9;
  const auto run = [&](const std::vector<int32_t>& tokens) {
    SequenceCache sequence(world.manager, "");
    const int64_t hit = sequence.MatchPrefix(tokens);
    if (hit > 0) {
      EXPECT_NE(sequence.Pages()[0][hit / kPage - 1].exact, kNoPage);
    }
    for (int64_t page = 0; page + 1 < hit / kPage; ++page) EXPECT_EQ(sequence.Pages()[0][page].exact, kNoPage);
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
  EXPECT_EQ(world.pool.UsedBytes(), world.pool.EvictableBytes());
  world.prefix.Clear();
  EXPECT_EQ(world.pool.UsedBytes(), 0);
}

// The same prompt again, after an answer that goes on in other pages; and what goes on after the answer.
TEST(SequenceCache, HitsEndWhereAPromptEnded) {
  World world({{2, 1}});
  const auto prompt = Tokens(3 * kPage + 3);
  auto answered = prompt;
  answered.resize(6 * kPage + 5, 8);
  const auto run = [&](const std::vector<int32_t>& from, std::span<const int32_t> all) {
    SequenceCache sequence(world.manager, "");
    const int64_t hit = sequence.MatchPrefix(from);
    for (int64_t length = static_cast<int64_t>(from.size()); sequence.Length() < std::ssize(all); ++length) {
      EXPECT_TRUE(sequence.Reserve(length - sequence.Length()));
      sequence.Commit(all.first(static_cast<size_t>(length)));
    }
    sequence.Finish(all);
    return hit;
  };
  EXPECT_EQ(run(prompt, answered), 0);
  EXPECT_EQ(run(prompt, answered), 3 * kPage) << "at once, not only after a miss";
  auto next = answered;
  next.resize(8 * kPage, 9);
  EXPECT_EQ(run(next, next), 6 * kPage) << "the answer's last full page";
  world.prefix.Clear();
  EXPECT_EQ(world.pool.UsedBytes(), 0);
}

TEST(SequenceCache, AdoptsTheTreesEqualPage) {
  World world({{0, 0}});
  const auto tokens = Tokens(kPage);
  SequenceCache first(world.manager, "");
  SequenceCache second(world.manager, "");
  ASSERT_TRUE(first.Reserve(kPage));
  ASSERT_TRUE(second.Reserve(kPage));
  EXPECT_EQ(world.pool.UsedPages(0, PageKind::kQuantized), 2);
  first.Commit(tokens);
  second.Commit(tokens);
  EXPECT_EQ(world.pool.UsedPages(0, PageKind::kQuantized), 1);
  EXPECT_EQ(first.Pages()[0][0], second.Pages()[0][0]);
}

TEST(SequenceCache, FreesPagesBehindTheWindow) {
  World world({{1, 0}}, 1 << 20, 2 * kPage);
  SequenceCache sequence(world.manager, "", Sharing::kPrivate);
  for (int64_t length = 1; length <= 10 * kPage; ++length) {
    ASSERT_TRUE(sequence.Reserve(1));
    sequence.Commit(Tokens(length));
    // The next query is at position `length` and sees (length - window, length].
    for (int64_t page = 0; page < sequence.PageCount(); ++page) {
      const bool visible = (page + 1) * kPage - 1 > length - 2 * kPage;
      EXPECT_EQ(sequence.Pages()[0][page] != PageRef{}, visible) << "page " << page << " at " << length;
    }
  }
  EXPECT_LE(world.pool.UsedPages(0, PageKind::kQuantized), 2);
}

// One layer with full attention, one with a window or chunks: each group keeps the records that its own layer reads.
TEST(SequenceCache, GroupsKeepWhatTheirOwnLayersSee) {
  for (const Visibility narrow :
       {SlidingWindow(2 * kPage), SlidingWindow(kPage + 5), SlidingWindow(1),
        Visibility{VisibilityKind::kChunked, 2 * kPage}, Visibility{VisibilityKind::kChunked, 40}}) {
    for (const Sharing sharing : {Sharing::kPrivate, Sharing::kShared}) {
      World world({{0, 0}, {0, 0}}, {{}, narrow});
      SequenceCache sequence(world.manager, "", sharing);
      for (int64_t length = 1; length <= 10 * kPage; ++length) {
        ASSERT_TRUE(sequence.Reserve(1));
        EXPECT_LE(world.pool.UsedBytes() - world.pool.EvictableBytes(), world.manager.spec.MaxBytes(length));
        sequence.Commit(Tokens(length));
        for (int64_t page = 0; page < sequence.PageCount(); ++page) {
          const bool visible = (page + 1) * kPage - 1 >= narrow.First(length);
          ASSERT_NE(sequence.Pages()[0][page], PageRef{});
          ASSERT_EQ(sequence.Pages()[1][page] != PageRef{}, visible) << "page " << page << " at " << length;
        }
      }
      // Records outside the window are evictable although their page is not: a hit elsewhere may still need the page.
      const int64_t passed = (narrow.First(10 * kPage) / kPage) * 1024;
      EXPECT_EQ(world.pool.EvictableBytes(), sharing == Sharing::kShared ? passed : 0);
      if (sharing == Sharing::kShared) {
        while (world.prefix.EvictOne()) continue;
        EXPECT_EQ(world.pool.EvictableBytes(), 0);
        EXPECT_EQ(world.prefix.Pages(), 10) << "a page went that the sequence still reads";
      }
    }
  }
}

// Gemma 3's pattern, five layers with a window of 1,024 per full layer, at 131,072 tokens: a budget of 5 % above the
// computed need suffices for chunks of 512, while the prefix cache keeps as much as fits.
TEST(SequenceCache, LongSequencesOfHybridModelsTakeWhatTheirWindowsNeed) {
  constexpr int64_t kTokens = 131072, kPageTokens = 64, kLayerBytes = 4096;
  formats::CacheLayout layout;
  layout.page_size = kPageTokens;
  layout.groups = {{5 * kLayerBytes, 0}, {kLayerBytes, 0}};
  layout.page_bytes = 6 * kLayerBytes;
  std::vector<Visibility> visibility;
  for (int layer = 0; layer < 6; ++layer) {
    layout.layers.emplace_back().group = layer < 5 ? 0 : 1;
    visibility.push_back(layer < 5 ? SlidingWindow(1024) : Visibility{});
  }
  const int64_t need = (kTokens + 5 * 1024) / kPageTokens * kLayerBytes;
  KvCacheManager manager(Cpu(), layout, visibility, {.budget_bytes = need * 105 / 100}, true);
  EXPECT_LE(manager.spec.MaxBytes(kTokens), need * 105 / 100);
  const auto tokens = Tokens(kTokens);
  for (int round = 0; round < 2; ++round) {
    SequenceCache sequence(manager, round == 0 ? "" : "another");
    while (sequence.Length() < kTokens) {
      ASSERT_TRUE(sequence.Reserve(512)) << "at " << sequence.Length();
      sequence.Commit(tokens);
    }
    EXPECT_LE(manager.pool.UsedBytes() - manager.pool.EvictableBytes(), need * 105 / 100);
  }
  SequenceCache hit(manager, "another");
  EXPECT_EQ(hit.MatchPrefix(Tokens(kTokens + 1)), kTokens) << "the end of the last sequence";
}

// A hit requires only those pages of a windowed group that the next query reads.
TEST(SequenceCache, HitsNeedOnlyWhatTheNextQueryReads) {
  World world({{0, 0}, {0, 0}}, {{}, SlidingWindow(kPage + 1)});
  const auto tokens = Tokens(8 * kPage + 1);
  const auto hit = [&](const std::vector<int32_t>& of) {
    SequenceCache sequence(world.manager, "");
    const int64_t length = sequence.MatchPrefix(of);
    for (int64_t page = 0; page < sequence.PageCount(); ++page) {
      EXPECT_NE(sequence.Pages()[0][page], PageRef{});
      EXPECT_EQ(sequence.Pages()[1][page] != PageRef{}, page == sequence.PageCount() - 1);
    }
    return length;
  };
  {
    SequenceCache first(world.manager, "");
    ASSERT_TRUE(first.Reserve(8 * kPage + 1));
    first.Commit(tokens);
    first.Finish(tokens);
  }
  EXPECT_EQ(hit(tokens), 8 * kPage);
  EXPECT_EQ(hit(Tokens(5 * kPage + 3)), 5 * kPage) << "a shorter prompt ends inside";
  // Records outside the window are evicted first, oldest first: 7 records; the last page's was just used.
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(world.prefix.EvictOne());
  EXPECT_EQ(world.pool.UsedPages(0, PageKind::kQuantized), 8);
  EXPECT_EQ(world.pool.UsedPages(1, PageKind::kQuantized), 4);
  EXPECT_EQ(hit(tokens), 8 * kPage) << "the end is still there";
  EXPECT_EQ(hit(Tokens(2 * kPage + 3)), 0) << "its window is gone";
  // Recomputing the prompt restores the missing records.
  {
    SequenceCache again(world.manager, "");
    const auto shorter = Tokens(2 * kPage + 3);
    ASSERT_TRUE(again.Reserve(2 * kPage + 3));
    again.Commit(shorter);
    again.Finish(shorter);
  }
  EXPECT_EQ(hit(Tokens(2 * kPage + 3)), 2 * kPage);
  EXPECT_EQ(world.pool.UsedPages(0, PageKind::kQuantized), 8);
}

// All layers with windows: nodes without records are removed with their descendants.
TEST(SequenceCache, EvictsEverythingWhenEveryLayerHasAWindow) {
  World world({{1, 0}}, {SlidingWindow(kPage)});
  const auto tokens = Tokens(20 * kPage);
  {
    SequenceCache sequence(world.manager, "");
    ASSERT_TRUE(sequence.Reserve(20 * kPage));
    sequence.Commit(tokens);
    sequence.Finish(tokens);
  }
  EXPECT_EQ(world.pool.UsedBytes(), world.pool.EvictableBytes());
  while (world.prefix.EvictOne()) continue;
  EXPECT_EQ(world.prefix.Pages(), 0);
  EXPECT_EQ(world.pool.UsedBytes(), 0);
}

TEST(SequenceCache, EvictsFromTheTreeWhenItMust) {
  World world({{0, 0}}, 4 * 1024);
  for (int32_t value = 0; value < 20; ++value) {
    SequenceCache sequence(world.manager, "");
    const auto tokens = Tokens(2 * kPage, value);
    ASSERT_TRUE(sequence.Reserve(2 * kPage));
    sequence.Commit(tokens);
  }
  EXPECT_EQ(world.prefix.Pages(), 4);
}

TEST(SequenceCache, LeaksNothingUnderRandomTraffic) {
  std::mt19937 random(11);
  for (int round = 0; round < 30; ++round) {
    const std::vector<Visibility> visibility = {
        round % 5 == 0 ? SlidingWindow(40) : Visibility{},
        round % 2 == 0 ? SlidingWindow(static_cast<int>(random() % 60 + 1)) : Visibility{VisibilityKind::kChunked, 24}};
    World world({{1 + round % 2, round % 2}, {round % 3 == 0, 0}}, visibility,
                40000 + static_cast<int64_t>(random() % 40000));
    struct Live {
      std::unique_ptr<SequenceCache> cache;
      std::vector<int32_t> tokens;
    };
    std::list<Live> live;
    for (int step = 0; step < 500; ++step) {
      if (live.size() < 6 && random() % 3 == 0) {
        Live fresh{std::make_unique<SequenceCache>(world.manager, random() % 2 == 0 ? "" : "salt"), {}};
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
      ASSERT_LE(world.pool.UsedBytes(), world.pool.BudgetBytes());
    }
    live.clear();
    world.prefix.Clear();
    EXPECT_EQ(world.pool.UsedBytes(), 0);
  }
}

}  // namespace
}  // namespace kvanta::cache
