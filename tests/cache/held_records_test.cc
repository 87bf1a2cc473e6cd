#include "cache/held_records.h"

#include <gtest/gtest.h>

#include "cache/page_pool.h"

namespace kvanta::cache {
namespace {

TEST(HeldRecords, HoldAddsAReferenceAndAdoptTakesOne) {
  formats::CacheLayout layout;
  layout.page_size = 16;
  layout.page_bytes = 4096;
  layout.groups = {{4096, 0}};
  PagePool pool(Cpu(), layout, {.budget_bytes = 8 * 4096});
  const PageId first = pool.Allocate(0, PageKind::kQuantized), second = pool.Allocate(0, PageKind::kQuantized);
  {
    HeldRecords held(pool);
    held.Hold(0, PageKind::kQuantized, first);
    held.Reserve(1);
    held.Adopt(0, PageKind::kQuantized, second);
    EXPECT_EQ(held.Bytes(), 2 * 4096);
    EXPECT_EQ(pool.References(0, PageKind::kQuantized, first), 2);
    EXPECT_EQ(pool.References(0, PageKind::kQuantized, second), 1);
  }
  EXPECT_EQ(pool.References(0, PageKind::kQuantized, first), 1);
  EXPECT_EQ(pool.References(0, PageKind::kQuantized, second), 0);
  EXPECT_EQ(pool.UsedBytes(), 4096);
}

}  // namespace
}  // namespace kvanta::cache
