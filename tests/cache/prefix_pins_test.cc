// Prefixes that are kept for a time: others are evicted before them, within a share of the memory.
#include <gtest/gtest.h>

#include "cache/small_pages.h"

namespace kvanta::cache {
namespace {

class PrefixPinsTest : public ::testing::Test {
 protected:
  void Put(const std::vector<int32_t>& tokens) {
    for (int64_t i = 0; i < std::ssize(tokens) / kPageSize; ++i) {
      PageRef page{pool_.Allocate(0, PageKind::kQuantized), kNoPage};
      const PageId own = page.quantized;
      ASSERT_TRUE(cache_.Insert(tokens, "", i, {&page, 1}));
      pool_.Release(0, PageKind::kQuantized, own);
    }
  }
  int64_t Cached(const std::vector<int32_t>& tokens) const {
    std::vector<uint8_t> present;
    return cache_.Present(tokens, "", std::ssize(tokens) / kPageSize, present);
  }
  void Pin(const std::vector<int32_t>& tokens, double seconds, int64_t max_bytes = 64 * kPageBytes) {
    cache_.Pin(tokens, "", std::ssize(tokens) / kPageSize, seconds, max_bytes);
  }

  PagePool pool_{Cpu(), SmallPages(), {.budget_bytes = 64 * kPageBytes, .poison_unused = true}};
  double now_ = 1000;
  PrefixCache cache_{pool_, KvCacheSpec(SmallPages()), [this] { return now_; }};
  const std::vector<int32_t> old_ = PageTokens(3 * kPageSize, 1), fresh_ = PageTokens(4 * kPageSize, 2);
};

TEST_F(PrefixPinsTest, OthersAreEvictedFirst) {
  Put(old_);
  Pin(old_, 100);
  EXPECT_EQ(cache_.PinnedBytes(), 3 * kPageBytes);
  Put(fresh_);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(cache_.EvictOne());
  EXPECT_EQ(Cached(fresh_), 0);
  EXPECT_EQ(Cached(old_), 3);
  ASSERT_TRUE(cache_.EvictOne()) << "a sequence that runs goes first";
  EXPECT_EQ(Cached(old_), 2);
  EXPECT_EQ(cache_.PinnedBytes(), 2 * kPageBytes);
  while (cache_.EvictOne()) {
  }
  EXPECT_EQ(cache_.PinnedBytes(), 0);
  EXPECT_EQ(pool_.UsedBytes(), 0);
}

TEST_F(PrefixPinsTest, TheirTimeEnds) {
  Put(old_);
  Pin(old_, 0.01);  // the next whole second of the clock
  Put(fresh_);
  now_ += 1;
  EXPECT_EQ(cache_.PinnedBytes(), 0);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(cache_.EvictOne());
  EXPECT_EQ(Cached(old_), 0);
  EXPECT_EQ(Cached(fresh_), 4);
}

TEST_F(PrefixPinsTest, ALongerTimeIsNotShortened) {
  Put(old_);
  Pin(old_, 100);
  Pin(old_, 0.01);
  EXPECT_EQ(cache_.PinnedBytes(), 3 * kPageBytes);
  now_ += 1;
  EXPECT_EQ(cache_.PinnedBytes(), 3 * kPageBytes);
}

TEST_F(PrefixPinsTest, TheFirstPagesArePinnedWithinTheShare) {
  Put(old_);
  Put(fresh_);
  Pin(old_, 100, 5 * kPageBytes);
  Pin(fresh_, 100, 5 * kPageBytes);
  EXPECT_EQ(cache_.PinnedBytes(), 5 * kPageBytes);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(cache_.EvictOne());
  EXPECT_EQ(Cached(old_), 3);
  EXPECT_EQ(Cached(fresh_), 2);
}

// A prefix that others continue: its continuation is not pinned, and a longer pin includes the shorter one.
TEST_F(PrefixPinsTest, ContinuationsAreOthers) {
  const std::vector<int32_t> longer = PageTokens(6 * kPageSize, 1);
  Put(longer);
  Pin(old_, 100);
  Put(fresh_);
  for (int i = 0; i < 7; ++i) ASSERT_TRUE(cache_.EvictOne());
  EXPECT_EQ(Cached(longer), 3);
  Put(longer);
  Pin(longer, 200);
  EXPECT_EQ(cache_.PinnedBytes(), 6 * kPageBytes);
  const PageId exact = pool_.Allocate(0, PageKind::kExact);
  cache_.AttachExact(longer, "", 5, 0, exact);
  pool_.Release(0, PageKind::kExact, exact);
  EXPECT_EQ(cache_.PinnedBytes(), 6 * kPageBytes + kExactBytes);
  cache_.Clear();
  EXPECT_EQ(cache_.PinnedBytes(), 0);
}

}  // namespace
}  // namespace kvanta::cache
