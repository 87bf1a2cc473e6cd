#include "cache/page_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string_view>
#include <vector>

#include "kvanta/error.h"

namespace kvanta::cache {
namespace {

formats::CacheLayout Layout(int64_t page_bytes, int64_t exact_bytes) {
  formats::CacheLayout layout;
  layout.page_size = 16;
  layout.page_bytes = page_bytes;
  layout.exact_page_bytes = exact_bytes;
  return layout;
}

TEST(PagePool, RefusesABudgetThatHoldsNoPage) {
  EXPECT_THROW(PagePool(Cpu(), Layout(4096, 8192), {.budget_bytes = 12287}), InputError);
  PagePool store(Cpu(), Layout(4096, 8192), {.budget_bytes = 12288});
  EXPECT_EQ(store.FreePages(PageKind::kQuantized), 3);
  EXPECT_EQ(store.FreePages(PageKind::kExact), 1);
  EXPECT_EQ(store.CommittedBytes(), 0);
}

TEST(PagePool, HasNoExactRecordsWithoutExactLayers) {
  PagePool store(Cpu(), Layout(4096, 0), {.budget_bytes = 8192});
  EXPECT_EQ(store.Allocate(PageKind::kExact), kNoPage);
  EXPECT_EQ(store.FreePages(PageKind::kExact), 0);
  EXPECT_EQ(store.Base(PageKind::kExact), nullptr);
}

TEST(PagePool, MovesBudgetBetweenPools) {
  PagePool store(Cpu(), Layout(4096, 12288), {.budget_bytes = 24576});
  std::vector<PageId> pages;
  while (true) {
    const PageId page = store.Allocate(PageKind::kQuantized);
    if (page == kNoPage) break;
    pages.push_back(page);
  }
  EXPECT_EQ(pages.size(), 6u);
  EXPECT_EQ(store.Allocate(PageKind::kExact), kNoPage);
  for (int i = 0; i < 3; ++i) store.Release(PageKind::kQuantized, pages[i]);
  EXPECT_EQ(store.CommittedBytes(), 24576);
  const PageId exact = store.Allocate(PageKind::kExact);
  ASSERT_NE(exact, kNoPage);
  EXPECT_EQ(store.CommittedBytes(), 24576);
  EXPECT_EQ(store.Allocate(PageKind::kQuantized), kNoPage);
  store.Release(PageKind::kExact, exact);
  EXPECT_NE(store.Allocate(PageKind::kQuantized), kNoPage);
}

// The host's memory, of which at most `limit` bytes are committed at one time.
class ScarceDevice final : public Device {
 public:
  class Part final : public Reservation {
   public:
    Part(ScarceDevice& device, size_t bytes) : device_(device), memory_(Cpu().Reserve(bytes)) {}
    uint8_t* data() const noexcept override { return memory_->data(); }
    size_t bytes() const noexcept override { return memory_->bytes(); }
    bool Commit(size_t offset, size_t bytes) noexcept override {
      if (device_.committed + bytes > device_.limit) return false;
      device_.committed += bytes;
      EXPECT_TRUE(offsets_.insert(offset).second) << "committed twice";
      return true;
    }
    void Release(size_t offset, size_t bytes) noexcept override {
      device_.committed -= bytes;
      EXPECT_EQ(offsets_.erase(offset), 1u) << "never committed";
      memory_->Release(offset, bytes);
    }

   private:
    ScarceDevice& device_;
    std::unique_ptr<Reservation> memory_;
    std::set<size_t> offsets_;
  };

  std::string_view Name() const noexcept override { return "scarce"; }
  Buffer Allocate(size_t bytes) override { return Cpu().Allocate(bytes); }
  std::unique_ptr<Reservation> Reserve(size_t bytes) override { return std::make_unique<Part>(*this, bytes); }
  void CopyIn(void* device, const void* host, size_t bytes) override { Cpu().CopyIn(device, host, bytes); }
  void CopyOut(void* host, const void* device, size_t bytes) override { Cpu().CopyOut(host, device, bytes); }
  void Fill(void* device, uint8_t byte, size_t bytes) override { Cpu().Fill(device, byte, bytes); }
  int64_t AvailableBytes() const override { return static_cast<int64_t>(limit - committed); }

  size_t limit = 0;
  size_t committed = 0;
};

TEST(PagePool, CommitsWhatItHandsOut) {
  ScarceDevice device;
  device.limit = 5 * 4096;
  PagePool store(device, Layout(4096, 12288), {.budget_bytes = 6 * 4096});
  std::vector<PageId> pages;
  for (PageId page = 0; (page = store.Allocate(PageKind::kQuantized)) != kNoPage;) pages.push_back(page);
  EXPECT_EQ(pages.size(), 5u) << "the sixth has no memory";
  EXPECT_EQ(device.committed, static_cast<size_t>(store.CommittedBytes()));
  for (const PageId page : pages) store.Release(PageKind::kQuantized, page);
  EXPECT_EQ(device.committed, 5u * 4096) << "free records keep their memory";

  device.limit = 6 * 4096;  // an exact record takes the room of three, of which two are given back for it
  const PageId exact = store.Allocate(PageKind::kExact);
  ASSERT_NE(exact, kNoPage);
  EXPECT_EQ(device.committed, 6u * 4096);
  for (int i = 0; i < 3; ++i) EXPECT_NE(store.Allocate(PageKind::kQuantized), kNoPage);
  store.Release(PageKind::kExact, exact);
  device.limit = 3 * 4096;
  EXPECT_EQ(store.Allocate(PageKind::kQuantized), kNoPage) << "one that was given back finds no memory";
  EXPECT_EQ(device.committed, 3u * 4096);
  device.limit = 6 * 4096;
  EXPECT_NE(store.Allocate(PageKind::kQuantized), kNoPage);
  EXPECT_EQ(device.committed, static_cast<size_t>(store.CommittedBytes()));
}

TEST(PagePool, PoisonsFreshAndFreedRecords) {
  PagePool store(Cpu(), Layout(4096, 8192), {.budget_bytes = 65536, .poison_unused = true});
  for (const PageKind kind : {PageKind::kQuantized, PageKind::kExact}) {
    const PageId page = store.Allocate(kind);
    uint8_t* record = store.Base(kind) + page * store.RecordBytes(kind);
    const auto poisoned = [&] {
      return std::all_of(record, record + store.RecordBytes(kind), [](uint8_t byte) { return byte == 0xFF; });
    };
    EXPECT_TRUE(poisoned());
    std::memset(record, 1, static_cast<size_t>(store.RecordBytes(kind)));
    store.Retain(kind, page);
    store.Release(kind, page);
    EXPECT_FALSE(poisoned()) << "a record in use was poisoned";
    store.Release(kind, page);
    EXPECT_TRUE(poisoned());
  }
}

// Random traffic against a model of it: counts and bytes are exact, records never overlap, contents survive.
TEST(PagePool, AccountsExactlyUnderRandomTraffic) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t sizes[2] = {static_cast<int64_t>(random() % 5 + 1) * 1040,
                              static_cast<int64_t>(random() % 5 + 1) * 2064};
    const int64_t budget = sizes[0] + sizes[1] + static_cast<int64_t>(random() % 100000);
    PagePool store(Cpu(), Layout(sizes[0], sizes[1]), {.budget_bytes = budget, .poison_unused = seed % 2 == 0});
    struct Held {
      PageKind kind;
      PageId page;
      int references;
      uint8_t mark;
    };
    std::vector<Held> held;
    for (int step = 0; step < 2000; ++step) {
      const auto kind = static_cast<PageKind>(random() % 2);
      if (random() % 100 < 55) {
        const int64_t free = store.FreePages(kind);
        const PageId page = store.Allocate(kind);
        ASSERT_EQ(page != kNoPage, free > 0);
        if (page != kNoPage) {
          const auto mark = static_cast<uint8_t>(random());
          std::memset(store.Base(kind) + page * store.RecordBytes(kind), mark,
                      static_cast<size_t>(store.RecordBytes(kind)));
          held.push_back({kind, page, 1, mark});
        }
      } else if (!held.empty()) {
        const size_t index = random() % held.size();
        Held& it = held[index];
        ASSERT_EQ(store.References(it.kind, it.page), it.references);
        const uint8_t* record = store.Base(it.kind) + it.page * store.RecordBytes(it.kind);
        ASSERT_TRUE(std::all_of(record, record + store.RecordBytes(it.kind), [&](uint8_t b) { return b == it.mark; }));
        if (random() % 4 == 0) {
          store.Retain(it.kind, it.page);
          ++it.references;
        } else {
          store.Release(it.kind, it.page);
          if (--it.references == 0) held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
        }
      }
      int64_t used[2] = {0, 0};
      for (const Held& it : held) ++used[static_cast<int>(it.kind)];
      ASSERT_EQ(store.UsedPages(PageKind::kQuantized), used[0]);
      ASSERT_EQ(store.UsedPages(PageKind::kExact), used[1]);
      ASSERT_EQ(store.UsedBytes(), used[0] * sizes[0] + used[1] * sizes[1]);
      ASSERT_LE(store.UsedBytes(), store.CommittedBytes());
      ASSERT_LE(store.CommittedBytes(), budget);
    }
  }
}

}  // namespace
}  // namespace kvanta::cache
