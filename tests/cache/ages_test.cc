// Precision by age in the cache: which records a sequence has, what a prefix hit needs, and bounds of bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <list>
#include <random>

#include "cache/prefix_hit.h"
#include "cache/sequence_cache.h"
#include "kvanta/error.h"

namespace kvanta::cache {
namespace {

constexpr int kPage = 16;

struct AgedWorld {
  AgedWorld(const std::string& scheme, Visibility sees, int64_t budget = 1 << 24)
      : visibility(sees),
        layout(formats::PlanCache({KvScheme::Parse(scheme)}, {{1, 32}}, kPage)),
        manager(Cpu(), layout, std::vector{sees}, {.budget_bytes = budget, .poison_unused = true}, true) {}
  Visibility visibility;
  formats::CacheLayout layout;
  KvCacheManager manager;

  const formats::LayerScheme& Layer() const { return layout.layers[0]; }
  // The level of `page` for a query in page `own`, implemented independently of AgeRule. 0: the first one.
  size_t Level(int64_t own, int64_t page) const {
    size_t level = 0;
    for (const formats::AgeScheme& age : Layer().ages) level += own - page >= age.pages ? 1 : 0;
    return page < Layer().ageless_pages ? 0 : level;
  }
  // True if some query at [start, end) reads the page from the level.
  bool Reads(size_t level, int64_t page, int64_t start, int64_t end) const {
    for (int64_t position = std::max(start, page * kPage); position < end; ++position) {
      const bool sees = visibility.First(position) < (page + 1) * kPage;
      if (sees && Level(position / kPage, page) == level) return true;
    }
    return false;
  }
};

// During a step, a page has its first level while a query of the step reads it or a later level is encoded from it, and
// the later levels that queries read from the step on, once it has aged.
void ExpectLevels(const AgedWorld& world, const SequenceCache& sequence, int64_t start, int64_t end) {
  constexpr int64_t kHorizon = 40 * kPage;
  for (int64_t page = world.visibility.First(start) / kPage; page * kPage < end; ++page) {
    const PageRef ref = sequence.Pages()[0][page];
    const bool ages_now = !world.Reads(1, page, 0, start) && !world.Reads(2, page, 0, start) &&
                          (world.Reads(1, page, start, end) || world.Reads(2, page, start, end));
    const bool has_aged = world.Reads(1, page, 0, end) || world.Reads(2, page, 0, end);
    const bool closed = (page + 1) * kPage <= end;
    const bool is_written = world.Layer().exact_open ? closed && page >= world.Layer().sink_pages : true;
    EXPECT_EQ(ref.quantized != kNoPage, is_written && (world.Reads(0, page, start, end) || ages_now || !has_aged))
        << "page " << page << " of " << start << ".." << end;
    for (const PageKind kind : kAgedKinds) {
      EXPECT_EQ(ref.Of(kind) != kNoPage, has_aged && world.Reads(AgeIndex(kind) + 1, page, start, kHorizon))
          << Name(kind) << " page " << page << " of " << start << ".." << end;
    }
  }
}

std::vector<std::string> AgedSchemes() {
  return {"0=int8,32=t3+sink=0", "0=int8,16=int4,80=t2", "0=int4,48=t3",
          "0=int4+exact=2+sink=2,32=int3_g32,48=t2+sink=3"};
}

std::vector<Visibility> AgedVisibilities() {
  return {Visibility{}, SlidingWindow(20), SlidingWindow(70), {VisibilityKind::kChunked, 100}};
}

TEST(AgedSequence, HasTheRecordsThatTheRuleNeeds) {
  std::mt19937 random(3);
  for (const std::string& scheme : AgedSchemes()) {
    for (const Visibility& visibility : AgedVisibilities()) {
      SCOPED_TRACE(fmt::format("{} span {}", scheme, visibility.span));
      AgedWorld world(scheme, visibility);
      for (int round = 0; round < 20; ++round) {
        SequenceCache sequence(world.manager, std::to_string(round),
                               round % 2 == 0 ? Sharing::kPrivate : Sharing::kShared);
        while (sequence.Length() < 12 * kPage) {
          const int64_t start = sequence.Length();
          const auto count = static_cast<int64_t>(random() % (random() % 3 == 0 ? 8 * kPage : 2 * kPage) + 1);
          const int64_t before = world.manager.pool.UsedBytes();
          const int64_t bytes = sequence.BytesToReserve(count);
          ASSERT_TRUE(sequence.Reserve(count));
          EXPECT_EQ(world.manager.pool.UsedBytes() - before, bytes);
          EXPECT_LE(world.manager.pool.UsedBytes() - world.manager.pool.EvictableBytes(),
                    world.manager.spec.MaxBytes(start + count, (start % kPage + count + kPage - 1) / kPage));
          ExpectLevels(world, sequence, start, start + count);
          sequence.Commit(std::vector<int32_t>(static_cast<size_t>(start + count), 5));
          EXPECT_LE(world.manager.pool.UsedBytes() - world.manager.pool.EvictableBytes(),
                    world.manager.spec.MaxBytes(start + count, 1));
        }
        if (::testing::Test::HasFailure()) return;
      }
      world.manager.prefix->Clear();
      EXPECT_EQ(world.manager.pool.UsedBytes(), 0);
    }
  }
}

// A hit needs of each page what the queries after it read, no more, and of the page that ages next its first level.
TEST(AgedSequence, HitsAreAsLongAsTheirRecords) {
  std::mt19937 random(7);
  for (const std::string& scheme : AgedSchemes()) {
    for (const Visibility& visibility : AgedVisibilities()) {
      AgedWorld world(scheme, visibility);
      const KvCacheSpec& spec = world.manager.spec;
      constexpr int64_t kPages = 12;
      for (int round = 0; round < 200; ++round) {
        std::vector<uint8_t> present(RecordIndex(spec, kPages, 0, PageKind::kQuantized));
        for (uint8_t& each : present) each = random() % (round % 4 == 0 ? 3 : 25) != 0 ? 1 : 0;
        const auto has = [&](int64_t page, int group, PageKind kind) {
          return present[RecordIndex(spec, page, group, kind)] != 0;
        };
        int64_t longest = 0;
        for (int64_t pages = 1; pages <= kPages; ++pages) {
          bool whole = true;
          for (int64_t page = 0; page < pages; ++page) {
            for (const PageKind kind : kPageKinds) {
              if (ReadsAfterHit(spec.groups[0], page, pages, kind)) whole = whole && has(page, 0, kind);
            }
          }
          if (whole) longest = pages;
        }
        ASSERT_EQ(LongestHit(spec, kPages, has), longest)
            << scheme << " span " << visibility.span << " round " << round;
      }
    }
  }
}

// Conversations in a small cache: every hit has what the step after it reads; nothing is lost in the end.
TEST(AgedSequence, SharesLevelsUnderEviction) {
  for (const std::string& scheme : AgedSchemes()) {
    AgedWorld world(scheme, {}, 90'000);
    std::mt19937 random(11);
    std::list<std::vector<int32_t>> conversations(4);
    int64_t hits = 0;
    for (int round = 0; round < 300; ++round) {
      auto at = conversations.begin();
      std::advance(at, random() % conversations.size());
      std::vector<int32_t>& tokens = *at;
      if (tokens.size() > 14 * kPage) tokens.resize(random() % (4 * kPage));
      for (size_t more = random() % 60 + 1; more > 0; --more) {
        tokens.push_back(static_cast<int32_t>(tokens.size() < 3 * kPage ? 1 : random() % 1000));
      }
      SequenceCache sequence(world.manager, "");
      hits += sequence.MatchPrefix(tokens);
      while (sequence.Length() < std::ssize(tokens)) {
        const int64_t start = sequence.Length();
        const int64_t count = std::min<int64_t>(std::ssize(tokens) - start, static_cast<int64_t>(random() % 50 + 1));
        ASSERT_TRUE(sequence.Reserve(count)) << scheme << " round " << round;
        ExpectLevels(world, sequence, start, start + count);
        if (::testing::Test::HasFailure()) FAIL() << scheme << " round " << round;
        sequence.Commit(tokens);
      }
      sequence.Finish(tokens);
    }
    EXPECT_GT(hits, 300 * kPage) << scheme;
    EXPECT_GT(world.manager.prefix->Evictions(), 10) << scheme;
    world.manager.prefix->Clear();
    EXPECT_EQ(world.manager.pool.UsedBytes(), 0);
  }
}

// At a length, the mean of a page's bytes: young pages in the first level, all others in the last one.
TEST(AgedSequence, MeanBytesOfAPage) {
  AgedWorld world("0=int8,32=t2+sink=1", {});
  const KvCacheGroup& group = world.manager.spec.groups[0];
  const auto first = static_cast<double>(group.page_bytes), last = static_cast<double>(group.age_bytes[0]);
  EXPECT_EQ(group.MeanPageBytes(kPage), first);
  EXPECT_EQ(group.MeanPageBytes(3 * kPage), first);
  EXPECT_DOUBLE_EQ(group.MeanPageBytes(30 * kPage), (3 * first + 27 * last) / 30);
  EXPECT_DOUBLE_EQ(world.manager.spec.BytesPerToken(30 * kPage), (3 * first + 27 * last) / 30 / kPage);
  SequenceCache sequence(world.manager, "", Sharing::kPrivate);
  for (int page = 0; page < 30; ++page) {
    ASSERT_TRUE(sequence.Reserve(kPage));
    sequence.Commit(std::vector<int32_t>(static_cast<size_t>((page + 1) * kPage)));
  }
  EXPECT_EQ(world.manager.pool.UsedBytes(), static_cast<int64_t>(3 * first + 27 * last));
}

TEST(AgedGroups, LayersOfOneGroupHaveTheSameAges) {
  const std::vector<KvScheme> schemes = {KvScheme::Parse("0=int8,32=t3"), KvScheme::Parse("0=int8,64=t3"),
                                         KvScheme::Parse("int8"), KvScheme::Parse("0=int8,32=int4")};
  EXPECT_EQ(GroupLayers(schemes, {}), (std::vector<int>{0, 1, 2, 0}));
  const formats::CacheLayout layout = formats::PlanCache(schemes, std::vector<formats::LayerShape>(4, {1, 32}), kPage);
  EXPECT_THROW(KvCacheSpec{layout}, InputError);
}

}  // namespace
}  // namespace kvanta::cache
