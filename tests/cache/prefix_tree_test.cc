#include "cache/prefix_tree.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace kvanta::cache {
namespace {

constexpr int kPageSize = 16;

formats::CacheLayout Layout() {
  formats::CacheLayout layout;
  layout.page_size = kPageSize;
  layout.page_bytes = 1024;
  layout.exact_page_bytes = 2048;
  return layout;
}

std::vector<int32_t> Tokens(int count, int salt = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(i * 7 + salt);
  return tokens;
}

class PrefixTreeTest : public ::testing::Test {
 protected:
  PageRef Page() { return {store_.Allocate(PageKind::kQuantized), kNoPage}; }
  void Drop(PageRef page) { store_.Release(PageKind::kQuantized, page.quantized); }
  // Inserts and gives the own reference away.
  PageRef Put(const std::vector<int32_t>& tokens, int64_t index, const std::string& salt = "") {
    const PageRef page = Page();
    const PageRef in_tree = tree_.Insert(tokens, salt, index, page);
    Drop(page);
    return in_tree;
  }

  PagePool store_{Cpu(), Layout(), {.budget_bytes = 64 * 1024, .poison_unused = true}};
  PrefixTree tree_{store_, kPageSize};
};

TEST_F(PrefixTreeTest, FindsWholePagesOnly) {
  const auto tokens = Tokens(3 * kPageSize);
  const PageRef first = Put(tokens, 0);
  const PageRef second = Put(tokens, 1);
  EXPECT_EQ(tree_.Match(std::span(tokens).first(kPageSize - 1), "", 9).size(), 0u);
  EXPECT_EQ(tree_.Match(std::span(tokens).first(2 * kPageSize), "", 1), std::vector<PageRef>{first});
  EXPECT_EQ(tree_.Match(tokens, "", 9), (std::vector<PageRef>{first, second}));
  EXPECT_EQ(store_.References(PageKind::kQuantized, first.quantized), 3);
  EXPECT_EQ(store_.References(PageKind::kQuantized, second.quantized), 2);
}

TEST_F(PrefixTreeTest, KeepsSaltsApart) {
  const auto tokens = Tokens(kPageSize);
  Put(tokens, 0, "one");
  EXPECT_EQ(tree_.Match(tokens, "", 9).size(), 0u);
  EXPECT_EQ(tree_.Match(tokens, "one", 9).size(), 1u);
}

TEST_F(PrefixTreeTest, RefusesAPageWithoutItsPredecessors) {
  const auto tokens = Tokens(2 * kPageSize);
  const PageRef page = Page();
  EXPECT_EQ(tree_.Insert(tokens, "", 1, page), page);
  EXPECT_EQ(tree_.Pages(), 0);
  EXPECT_EQ(store_.References(PageKind::kQuantized, page.quantized), 1);
}

TEST_F(PrefixTreeTest, TheFirstOfEqualPagesWins) {
  const auto tokens = Tokens(kPageSize);
  const PageRef first = Put(tokens, 0);
  const PageRef second = Page();
  EXPECT_EQ(tree_.Insert(tokens, "", 0, second), first);
  EXPECT_EQ(tree_.Pages(), 1);
  EXPECT_EQ(store_.References(PageKind::kQuantized, second.quantized), 1);
}

TEST_F(PrefixTreeTest, ComparesTokensNotHashes) {
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) {
    auto tokens = Tokens(kPageSize);
    tokens[random() % kPageSize] ^= 1 << (random() % 20);
    Put(tokens, 0);
    const auto other = Tokens(kPageSize, i + 1);
    EXPECT_EQ(tree_.Match(other, "", 1).size(), 0u);
    tree_.EvictOne(PageKind::kQuantized);
  }
}

TEST_F(PrefixTreeTest, EvictsTheLeastRecentlyUsedLeaf) {
  std::vector<std::vector<int32_t>> prompts;
  while (store_.FreePages(PageKind::kQuantized) >= 2) {
    prompts.push_back(Tokens(2 * kPageSize, static_cast<int>(prompts.size()) + 1));
    Put(prompts.back(), 0);
    Put(prompts.back(), 1);
  }
  for (const PageRef& page : tree_.Match(prompts[0], "", 9)) Drop(page);  // the oldest, but used again
  EXPECT_EQ(tree_.EvictablePages(), tree_.Pages());
  ASSERT_TRUE(tree_.EvictOne(PageKind::kQuantized));
  EXPECT_EQ(store_.FreePages(PageKind::kQuantized), 1);
  EXPECT_NE(tree_.Peek(prompts[0], "", 1), nullptr);
  EXPECT_NE(tree_.Peek(prompts[1], "", 0), nullptr) << "an inner page went before its leaf";
  EXPECT_EQ(tree_.Peek(prompts[1], "", 1), nullptr);
}

TEST_F(PrefixTreeTest, NeverEvictsPagesInUse) {
  const auto tokens = Tokens(2 * kPageSize);
  Put(tokens, 0);
  Put(tokens, 1);
  const auto held = tree_.Match(tokens, "", 9);
  EXPECT_EQ(tree_.EvictablePages(), 0);
  EXPECT_EQ(tree_.EvictableBytes(), 0);
  std::vector<PageId> rest;
  for (PageId page; (page = store_.Allocate(PageKind::kQuantized)) != kNoPage;) rest.push_back(page);
  EXPECT_FALSE(tree_.EvictOne(PageKind::kQuantized));
  tree_.Clear();
  EXPECT_EQ(tree_.Pages(), 2);
  for (const PageRef& page : held) Drop(page);
  tree_.Clear();
  EXPECT_EQ(tree_.Pages(), 0);
  for (const PageId page : rest) store_.Release(PageKind::kQuantized, page);
  EXPECT_EQ(store_.UsedBytes(), 0);
}

// Random inserts, matches and evictions against a map of what was inserted: a match is a prefix of what was put there,
// with the same page, and no reference is lost.
TEST_F(PrefixTreeTest, AgreesWithAMapUnderRandomTraffic) {
  std::mt19937 random(7);
  std::map<std::pair<std::string, std::vector<int32_t>>, PageRef> known;  // every page ever inserted, by path
  for (int step = 0; step < 3000; ++step) {
    std::vector<int32_t> tokens;
    for (int page = 0; page < 4; ++page) tokens.insert(tokens.end(), kPageSize, static_cast<int32_t>(random() % 3));
    const std::string salt = random() % 2 == 0 ? "" : "salt";
    const auto held = tree_.Match(tokens, salt, 9);
    for (size_t i = 0; i < held.size(); ++i) {
      const std::vector<int32_t> path(tokens.begin(), tokens.begin() + static_cast<long>(i + 1) * kPageSize);
      ASSERT_EQ(known.at({salt, path}), held[i]);
    }
    if (held.size() < 4) {
      if (store_.FreePages(PageKind::kQuantized) == 0) tree_.EvictOne(PageKind::kQuantized);
      const PageRef page = Page();
      ASSERT_NE(page.quantized, kNoPage);
      ASSERT_EQ(tree_.Insert(tokens, salt, static_cast<int64_t>(held.size()), page), page);
      known[{salt, {tokens.begin(), tokens.begin() + static_cast<long>(held.size() + 1) * kPageSize}}] = page;
      Drop(page);
    }
    for (const PageRef& page : held) Drop(page);
    ASSERT_EQ(store_.UsedPages(PageKind::kQuantized), tree_.Pages());
    ASSERT_EQ(tree_.EvictablePages(), tree_.Pages());
  }
}

}  // namespace
}  // namespace kvanta::cache
