#include "cache/prefix_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "cache/small_pages.h"

namespace kvanta::cache {
namespace {

class PrefixCacheTest : public ::testing::Test {
 protected:
  PageRef Page() { return {pool_.Allocate(0, PageKind::kQuantized), kNoPage}; }
  void Drop(PageRef page) { pool_.Release(0, PageKind::kQuantized, page.quantized); }
  // Inserts a page and releases the caller's reference.
  PageRef Put(const std::vector<int32_t>& tokens, int64_t index, const std::string& salt = "") {
    const PageRef page = Page();
    const PageRef cached = Insert(tokens, index, page, salt);
    Drop(page);
    return cached;
  }
  PageRef Insert(const std::vector<int32_t>& tokens, int64_t index, PageRef page, const std::string& salt = "") {
    cache_.Insert(tokens, salt, index, {&page, 1});
    return page;
  }
  BlockTable Match(std::span<const int32_t> tokens, const std::string& salt, int64_t max_pages) {
    return cache_.Match(tokens, salt, max_pages).records[0];
  }

  PagePool pool_{Cpu(), SmallPages(), {.budget_bytes = 64 * 1024, .poison_unused = true}};
  PrefixCache cache_{pool_, KvCacheSpec(SmallPages())};
};

TEST_F(PrefixCacheTest, FindsWholePagesOnly) {
  const auto tokens = PageTokens(3 * kPageSize);
  const PageRef first = Put(tokens, 0);
  const PageRef second = Put(tokens, 1);
  EXPECT_EQ(Match(std::span(tokens).first(kPageSize - 1), "", 9).size(), 0u);
  EXPECT_EQ(Match(std::span(tokens).first(2 * kPageSize), "", 1), std::vector<PageRef>{first});
  EXPECT_EQ(Match(tokens, "", 9), (std::vector<PageRef>{first, second}));
  EXPECT_EQ(pool_.References(0, PageKind::kQuantized, first.quantized), 3);
  EXPECT_EQ(pool_.References(0, PageKind::kQuantized, second.quantized), 2);
}

TEST_F(PrefixCacheTest, KeepsSaltsApart) {
  const auto tokens = PageTokens(kPageSize);
  Put(tokens, 0, "one");
  EXPECT_EQ(Match(tokens, "", 9).size(), 0u);
  EXPECT_EQ(Match(tokens, "one", 9).size(), 1u);
}

TEST_F(PrefixCacheTest, RefusesAPageWithoutItsPredecessors) {
  const auto tokens = PageTokens(2 * kPageSize);
  const PageRef page = Page();
  EXPECT_EQ(Insert(tokens, 1, page), page);
  EXPECT_EQ(cache_.Pages(), 0);
  EXPECT_EQ(pool_.References(0, PageKind::kQuantized, page.quantized), 1);
}

TEST_F(PrefixCacheTest, TheFirstOfEqualPagesWins) {
  const auto tokens = PageTokens(kPageSize);
  const PageRef first = Put(tokens, 0);
  const PageRef second = Page();
  EXPECT_EQ(Insert(tokens, 0, second), first);
  EXPECT_EQ(cache_.Pages(), 1);
  EXPECT_EQ(pool_.References(0, PageKind::kQuantized, second.quantized), 1);
}

TEST_F(PrefixCacheTest, ComparesTokensNotHashes) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    auto tokens = PageTokens(kPageSize);
    tokens[random() % kPageSize] ^= 1 << (random() % 20);
    Put(tokens, 0);
    const auto other = PageTokens(kPageSize, i + 1);
    EXPECT_EQ(Match(other, "", 1).size(), 0u);
    cache_.EvictOne();
  }
}

TEST_F(PrefixCacheTest, EvictsTheLeastRecentlyUsedLeaf) {
  std::vector<std::vector<int32_t>> prompts;
  while (pool_.FreePages(0, PageKind::kQuantized) >= 2) {
    prompts.push_back(PageTokens(2 * kPageSize, static_cast<int>(prompts.size()) + 1));
    Put(prompts.back(), 0);
    Put(prompts.back(), 1);
  }
  for (const PageRef& page : Match(prompts[0], "", 9)) Drop(page);  // the oldest, now recently used
  EXPECT_EQ(pool_.EvictableBytes(), cache_.Pages() * 1024);
  ASSERT_TRUE(cache_.EvictOne());
  EXPECT_EQ(pool_.FreePages(0, PageKind::kQuantized), 1);
  EXPECT_FALSE(cache_.Peek(prompts[0], "", 1).empty());
  EXPECT_FALSE(cache_.Peek(prompts[1], "", 0).empty()) << "an inner page went before its leaf";
  EXPECT_TRUE(cache_.Peek(prompts[1], "", 1).empty());
}

TEST_F(PrefixCacheTest, NeverEvictsPagesInUse) {
  const auto tokens = PageTokens(2 * kPageSize);
  Put(tokens, 0);
  Put(tokens, 1);
  const auto held = Match(tokens, "", 9);
  EXPECT_EQ(pool_.EvictableBytes(), 0);
  std::vector<PageId> rest;
  for (PageId page; (page = pool_.Allocate(0, PageKind::kQuantized)) != kNoPage;) rest.push_back(page);
  EXPECT_FALSE(cache_.EvictOne());
  cache_.Clear();
  EXPECT_EQ(cache_.Pages(), 2);
  for (const PageRef& page : held) Drop(page);
  cache_.Clear();
  EXPECT_EQ(cache_.Pages(), 0);
  for (const PageId page : rest) pool_.Release(0, PageKind::kQuantized, page);
  EXPECT_EQ(pool_.UsedBytes(), 0);
}

// Random inserts, matches and evictions checked against a map: a match is an inserted prefix with the same pages, and
// no reference leaks.
TEST_F(PrefixCacheTest, AgreesWithAMapUnderRandomTraffic) {
  std::mt19937 random(7);
  std::map<std::pair<std::string, std::vector<int32_t>>, PageRef> known;  // every page inserted so far, by path
  for (int step = 0; step < 3000; ++step) {
    std::vector<int32_t> tokens;
    for (int page = 0; page < 4; ++page) tokens.insert(tokens.end(), kPageSize, static_cast<int32_t>(random() % 3));
    const std::string salt = random() % 2 == 0 ? "" : "salt";
    const auto held = Match(tokens, salt, 9);
    for (size_t i = 0; i < held.size(); ++i) {
      const std::vector<int32_t> path(tokens.begin(), tokens.begin() + static_cast<long>(i + 1) * kPageSize);
      ASSERT_EQ(known.at({salt, path}), held[i]);
    }
    if (held.size() < 4) {
      if (pool_.FreePages(0, PageKind::kQuantized) == 0) cache_.EvictOne();
      const PageRef page = Page();
      ASSERT_NE(page.quantized, kNoPage);
      ASSERT_EQ(Insert(tokens, static_cast<int64_t>(held.size()), page, salt), page);
      known[{salt, {tokens.begin(), tokens.begin() + static_cast<long>(held.size() + 1) * kPageSize}}] = page;
      Drop(page);
    }
    for (const PageRef& page : held) Drop(page);
    ASSERT_EQ(pool_.UsedPages(0, PageKind::kQuantized), cache_.Pages());
    ASSERT_EQ(pool_.EvictableBytes(), cache_.Pages() * 1024);
  }
}

}  // namespace
}  // namespace kvanta::cache
