// Demotion of prefixes that nobody uses: in a share of the time, beyond which they are evicted.
#include <gtest/gtest.h>

#include "base/device.h"
#include "cache/kv_cache_manager.h"

namespace kvanta::cache {
namespace {

constexpr int kPageTokens = 16, kPages = 8;

class PrefixDemotionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    cache_.clock = [this] { return now_; };
    cache_.encode_levels = [this](int, const uint8_t*, std::span<uint8_t* const>) { now_ += seconds_of_page_; };
    const std::vector<int32_t> tokens(size_t{kPages} * kPageTokens);
    for (int64_t index = 0; index < kPages; ++index) {
      PageRef page;
      page.quantized = cache_.Allocate(0, PageKind::kQuantized, index);
      ASSERT_NE(page.quantized, kNoPage);
      ASSERT_TRUE(cache_.prefix->Insert(tokens, "", index, {&page, 1}));
      cache_.pool.Release(0, PageKind::kQuantized, page.quantized);
    }
  }
  // Pages demoted until it is refused.
  int Demoted() {
    int pages = 0;
    while (cache_.DemotePrefix()) ++pages;
    return pages;
  }

  double now_ = Now();
  double seconds_of_page_ = 0;
  KvCacheManager cache_{
      Cpu(),
      formats::PlanCache({KvScheme::Parse("0=int8,floor=int4+sink=0")}, {{.kv_heads = 1, .head_dim = 64}}, kPageTokens),
      {},
      {.budget_bytes = 1 << 20},
      /*prefix_caching=*/true};
};

TEST_F(PrefixDemotionTest, WithoutCostAllAreDemoted) {
  EXPECT_EQ(Demoted(), kPages);
}

TEST_F(PrefixDemotionTest, ShortTimeIsSpent) {
  seconds_of_page_ = 0.6;
  EXPECT_EQ(Demoted(), 2) << "a second is saved";
  EXPECT_EQ(cache_.demotions, 2);
  EXPECT_NEAR(cache_.demotion_seconds, 1.2, 1e-9);
  EXPECT_TRUE(cache_.prefix->EvictOne()) << "what is above the floor may be evicted";
  now_ += 5;  // .1 s more, of which .2 are missing
  EXPECT_EQ(Demoted(), 0);
  now_ += 10;
  EXPECT_EQ(Demoted(), 1);
  now_ += 1e6;
  EXPECT_EQ(Demoted(), 2) << "no more than a second is saved";
}

}  // namespace
}  // namespace kvanta::cache
