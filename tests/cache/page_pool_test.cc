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
  layout.groups = {{page_bytes, exact_bytes}};
  return layout;
}

TEST(PagePool, RefusesABudgetThatHoldsNoPage) {
  EXPECT_THROW(PagePool(Cpu(), Layout(4096, 8192), {.budget_bytes = 12287}), InputError);
  PagePool pool(Cpu(), Layout(4096, 8192), {.budget_bytes = 12288});
  EXPECT_EQ(pool.FreePages(0, PageKind::kQuantized), 3);
  EXPECT_EQ(pool.FreePages(0, PageKind::kExact), 1);
  EXPECT_EQ(pool.CommittedBytes(), 0);
}

TEST(PagePool, HasNoExactRecordsWithoutExactLayers) {
  PagePool pool(Cpu(), Layout(4096, 0), {.budget_bytes = 8192});
  EXPECT_EQ(pool.Allocate(0, PageKind::kExact), kNoPage);
  EXPECT_EQ(pool.FreePages(0, PageKind::kExact), 0);
  EXPECT_EQ(pool.Base(0, PageKind::kExact), nullptr);
}

TEST(PagePool, MovesBudgetBetweenPools) {
  PagePool pool(Cpu(), Layout(4096, 12288), {.budget_bytes = 24576});
  std::vector<PageId> pages;
  while (true) {
    const PageId page = pool.Allocate(0, PageKind::kQuantized);
    if (page == kNoPage) break;
    pages.push_back(page);
  }
  EXPECT_EQ(pages.size(), 6u);
  EXPECT_EQ(pool.Allocate(0, PageKind::kExact), kNoPage);
  for (int i = 0; i < 3; ++i) pool.Release(0, PageKind::kQuantized, pages[i]);
  EXPECT_EQ(pool.CommittedBytes(), 24576);
  const PageId exact = pool.Allocate(0, PageKind::kExact);
  ASSERT_NE(exact, kNoPage);
  EXPECT_EQ(pool.CommittedBytes(), 24576);
  EXPECT_EQ(pool.Allocate(0, PageKind::kQuantized), kNoPage);
  pool.Release(0, PageKind::kExact, exact);
  EXPECT_NE(pool.Allocate(0, PageKind::kQuantized), kNoPage);
}

// Host memory of which at most `limit` bytes can be committed at a time.
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
  PagePool pool(device, Layout(4096, 12288), {.budget_bytes = 6 * 4096});
  std::vector<PageId> pages;
  for (PageId page = 0; (page = pool.Allocate(0, PageKind::kQuantized)) != kNoPage;) pages.push_back(page);
  EXPECT_EQ(pages.size(), 5u) << "the sixth has no memory";
  EXPECT_EQ(device.committed, static_cast<size_t>(pool.CommittedBytes()));
  for (const PageId page : pages) pool.Release(0, PageKind::kQuantized, page);
  EXPECT_EQ(device.committed, 5u * 4096) << "free records keep their memory";

  device.limit = 6 * 4096;  // an exact record is as large as three quantized ones; two are decommitted for it
  const PageId exact = pool.Allocate(0, PageKind::kExact);
  ASSERT_NE(exact, kNoPage);
  EXPECT_EQ(device.committed, 6u * 4096);
  for (int i = 0; i < 3; ++i) EXPECT_NE(pool.Allocate(0, PageKind::kQuantized), kNoPage);
  pool.Release(0, PageKind::kExact, exact);
  device.limit = 3 * 4096;
  EXPECT_EQ(pool.Allocate(0, PageKind::kQuantized), kNoPage) << "one that was given back finds no memory";
  EXPECT_EQ(device.committed, 3u * 4096);
  device.limit = 6 * 4096;
  EXPECT_NE(pool.Allocate(0, PageKind::kQuantized), kNoPage);
  EXPECT_EQ(device.committed, static_cast<size_t>(pool.CommittedBytes()));
}

TEST(PagePool, RecordsOfAPoolFollowEachOther) {
  PagePool pool(Cpu(), Layout(4096, 8192), {.budget_bytes = 65536});
  for (const PageKind kind : {PageKind::kQuantized, PageKind::kExact}) {
    EXPECT_EQ(pool.Record(0, kind, 0), pool.Base(0, kind));
    EXPECT_EQ(pool.Record(0, kind, 2), pool.Base(0, kind) + 2 * pool.RecordBytes(0, kind));
  }
}

TEST(PagePool, PoisonsFreshAndFreedRecords) {
  PagePool pool(Cpu(), Layout(4096, 8192), {.budget_bytes = 65536, .poison_unused = true});
  for (const PageKind kind : {PageKind::kQuantized, PageKind::kExact}) {
    const PageId page = pool.Allocate(0, kind);
    uint8_t* record = pool.Record(0, kind, page);
    const auto poisoned = [&] {
      return std::all_of(record, record + pool.RecordBytes(0, kind), [](uint8_t byte) { return byte == 0xFF; });
    };
    EXPECT_TRUE(poisoned());
    std::memset(record, 1, static_cast<size_t>(pool.RecordBytes(0, kind)));
    pool.Retain(0, kind, page);
    pool.Release(0, kind, page);
    EXPECT_FALSE(poisoned()) << "a record in use was poisoned";
    pool.Release(0, kind, page);
    EXPECT_TRUE(poisoned());
  }
}

// Device that maps memory in granules, as GPUs do: a granule is unmapped when none of its records is committed.
class GranularDevice final : public Device {
 public:
  static constexpr size_t kGranule = 16384;
  class Part final : public Reservation {
   public:
    Part(GranularDevice& device, size_t bytes)
        : device_(device), memory_(Cpu().Reserve(bytes)), users_(bytes / kGranule + 1) {}
    uint8_t* data() const noexcept override { return memory_->data(); }
    size_t bytes() const noexcept override { return memory_->bytes(); }
    bool Commit(size_t offset, size_t bytes) noexcept override {
      for (size_t i = offset / kGranule; i * kGranule < offset + bytes; ++i) {
        if (users_[i]++ == 0) device_.mapped += kGranule;
      }
      return true;
    }
    void Release(size_t offset, size_t bytes) noexcept override {
      for (size_t i = offset / kGranule; i * kGranule < offset + bytes; ++i) {
        if (--users_[i] == 0) device_.mapped -= kGranule;
      }
    }
    size_t BytesToCommit(size_t offset, size_t bytes) const noexcept override { return With(0, offset, bytes); }
    size_t BytesToRelease(size_t offset, size_t bytes) const noexcept override { return With(1, offset, bytes); }
    size_t Granularity() const noexcept override { return kGranule; }

   private:
    size_t With(int users, size_t offset, size_t bytes) const {
      size_t sum = 0;
      for (size_t i = offset / kGranule; i * kGranule < offset + bytes; ++i) sum += users_[i] == users ? kGranule : 0;
      return sum;
    }
    GranularDevice& device_;
    std::unique_ptr<Reservation> memory_;
    std::vector<int> users_;
  };

  std::string_view Name() const noexcept override { return "granular"; }
  Buffer Allocate(size_t bytes) override { return Cpu().Allocate(bytes); }
  std::unique_ptr<Reservation> Reserve(size_t bytes) override { return std::make_unique<Part>(*this, bytes); }
  void CopyIn(void* device, const void* host, size_t bytes) override { Cpu().CopyIn(device, host, bytes); }
  void CopyOut(void* host, const void* device, size_t bytes) override { Cpu().CopyOut(host, device, bytes); }
  void Fill(void* device, uint8_t byte, size_t bytes) override { Cpu().Fill(device, byte, bytes); }
  int64_t AvailableBytes() const override { return int64_t{1} << 40; }

  size_t mapped = 0;
};

// A budget of a few records holds them, though they do not fill their granules.
TEST(PagePool, HoldsTheRecordsOfItsBudgetInPartsOfGranules) {
  GranularDevice device;
  PagePool pool(device, Layout(3000, 5000), {.budget_bytes = 7 * 3000 + 3 * 5000});
  for (int i = 0; i < 7; ++i) ASSERT_NE(pool.Allocate(0, PageKind::kQuantized), kNoPage) << i;
  for (int i = 0; i < 3; ++i) ASSERT_NE(pool.Allocate(0, PageKind::kExact), kNoPage) << i;
  EXPECT_EQ(pool.Allocate(0, PageKind::kQuantized), kNoPage);
  EXPECT_EQ(device.mapped, 3 * GranularDevice::kGranule);
}

// Scattered freed records keep their granules mapped: the budget limits mapped memory, not records.
TEST(PagePool, KeepsItsBudgetInMappedGranules) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    GranularDevice device;
    const int64_t budget = 32 * static_cast<int64_t>(GranularDevice::kGranule);
    PagePool pool(device, Layout(3000, 5000), {.budget_bytes = budget});
    std::vector<std::pair<PageKind, PageId>> held;
    for (int step = 0; step < 1000; ++step) {
      // Alternates phases of one kind, so that memory has to move between the pools.
      const PageKind kind = step / 250 % 2 == 0 ? PageKind::kQuantized : PageKind::kExact;
      const PageId page = pool.Allocate(0, kind);
      if (page != kNoPage) held.emplace_back(kind, page);
      if (page == kNoPage || random() % 3 == 0) {
        std::swap(held[random() % held.size()], held.back());
        pool.Release(0, held.back().first, held.back().second);
        held.pop_back();
      }
      ASSERT_LT(device.mapped, static_cast<size_t>(budget) + 2 * GranularDevice::kGranule)
          << "seed " << seed << ", step " << step;
      ASSERT_EQ(static_cast<size_t>(pool.CommittedBytes()), device.mapped);
    }
  }
}

TEST(PagePool, GroupsShareTheBudgetAndNothingElse) {
  formats::CacheLayout layout = Layout(4096, 0);
  layout.groups.push_back({8192, 4096});
  layout.page_bytes += 8192;
  layout.exact_page_bytes += 4096;
  PagePool pool(Cpu(), layout, {.budget_bytes = 16384});
  EXPECT_EQ(pool.Groups(), 2);
  EXPECT_EQ(pool.RecordBytes(1, PageKind::kQuantized), 8192);
  EXPECT_EQ(pool.Allocate(0, PageKind::kExact), kNoPage);
  const PageId small = pool.Allocate(0, PageKind::kQuantized), large = pool.Allocate(1, PageKind::kQuantized);
  ASSERT_NE(small, kNoPage);
  ASSERT_NE(large, kNoPage);
  EXPECT_EQ(pool.UsedBytes(), 4096 + 8192);
  EXPECT_EQ(pool.Allocate(1, PageKind::kQuantized), kNoPage);
  pool.SetCached(1, PageKind::kQuantized, large, true);
  EXPECT_EQ(pool.EvictableBytes(), 8192);
  pool.Retain(1, PageKind::kQuantized, large);
  EXPECT_EQ(pool.EvictableBytes(), 0);
  pool.Release(1, PageKind::kQuantized, large);
  EXPECT_EQ(pool.EvictableBytes(), 8192);
  pool.SetCached(1, PageKind::kQuantized, large, false);
  pool.Release(1, PageKind::kQuantized, large);
  pool.Release(0, PageKind::kQuantized, small);
  EXPECT_EQ(pool.UsedBytes() + pool.EvictableBytes(), 0);
}

// Records that queries do not all read are whole on every rank, and count in every rank's budget.
TEST(PagePool, RecordsOfWindowsAreOnEveryRank) {
  const KvScheme rows = KvScheme::Parse("bf16");
  const formats::CacheLayout layout =
      formats::PlanCache({rows, rows},
                         {{.kv_heads = 1, .head_dim = 32, .shared_kv = true},
                          {.kv_heads = 1, .head_dim = 32, .shared_kv = true, .row_tokens = 2}},
                         64, {0, 1});
  const int64_t window = layout.groups[0].page_bytes, entries = layout.groups[1].page_bytes;
  ASSERT_EQ(window, 2 * entries);
  PagePool pool(Cpu(), layout, {.budget_bytes = 8 * entries, .lists_changes = true, .ranks = 2});
  EXPECT_EQ(pool.RanksOfGroup(0), 1);
  EXPECT_EQ(pool.RanksOfGroup(1), 2);
  EXPECT_EQ(pool.RankOfPage(0, 3), 0);
  EXPECT_EQ(pool.RankOfPage(1, 3), 1);
  EXPECT_TRUE(pool.IsOwnPage(0, 3));
  EXPECT_FALSE(pool.IsOwnPage(1, 3));
  const PageId whole = pool.Allocate(0, PageKind::kQuantized);
  for (const int rank : {0, 1}) EXPECT_TRUE(pool.IsOfRank(0, PageKind::kQuantized, whole, rank));
  EXPECT_EQ(pool.UsedBytes(), window);
  std::vector<PageId> of_rank_1;
  for (PageId page; (page = pool.Allocate(1, PageKind::kQuantized, 1)) != kNoPage;) of_rank_1.push_back(page);
  EXPECT_EQ(of_rank_1.size(), 6U) << "next to the window's record";
  EXPECT_EQ(pool.UsedBytes(), window) << "bytes are rank 0's";
  EXPECT_EQ(pool.AvailableBytes(), 0) << "of the fullest";
  EXPECT_EQ(pool.Allocate(0, PageKind::kQuantized), kNoPage) << "rank 1 is full";
  EXPECT_NE(pool.Allocate(1, PageKind::kQuantized, 0), kNoPage);

  PagePool other(Cpu(), layout, {.budget_bytes = 8 * entries, .borrowed = true, .ranks = 2, .rank = 1});
  EXPECT_EQ(other.References(0, PageKind::kQuantized, whole), 1);
  std::memset(other.Record(0, PageKind::kQuantized, whole), 7, static_cast<size_t>(window));
  for (const int freed : {0, 1}) pool.Release(1, PageKind::kQuantized, of_rank_1[static_cast<size_t>(freed)]);
  const PageId second = pool.Allocate(0, PageKind::kQuantized);
  EXPECT_NE(second, kNoPage);
  for (const RecordChange& change : pool.TakeChanges()) {
    EXPECT_TRUE(other.IsOfRank(1, change.record.kind, change.record.page, 1));
    other.ReleaseMemory(change.record);
  }
  EXPECT_EQ(*other.Record(0, PageKind::kQuantized, whole), 7);
  pool.SetCached(0, PageKind::kQuantized, whole, true);
  EXPECT_EQ(pool.AvailableBytes(), window) << "evictable on both ranks";
}

// Records of ranks that pages are dealt to: each rank has a budget of its own, and numbers that no other has.
TEST(PagePool, DealsRecordsToRanks) {
  const formats::CacheLayout layout = Layout(4096, 8192);
  PagePool pool(Cpu(), layout, {.budget_bytes = 20000, .poison_unused = true, .lists_changes = true, .ranks = 4});
  std::set<PageId> all;
  std::vector<std::vector<PageId>> of_rank(4);
  for (int rank = 0; rank < 4; ++rank) {
    for (PageId page; (page = pool.Allocate(0, PageKind::kQuantized, rank)) != kNoPage;) {
      EXPECT_TRUE(all.insert(page).second);
      EXPECT_EQ(pool.References(0, PageKind::kQuantized, page), 1);
      for (int other = 0; other < 4; ++other) {
        EXPECT_EQ(pool.IsOfRank(0, PageKind::kQuantized, page, other), other == rank);
      }
      of_rank[static_cast<size_t>(rank)].push_back(page);
    }
    EXPECT_EQ(of_rank[static_cast<size_t>(rank)].size(), 4U);
    EXPECT_EQ(pool.UsedBytes(), 4 * 4096) << "bytes are rank 0's";
    EXPECT_EQ(pool.UsedPages(0, PageKind::kQuantized), 4);
    EXPECT_EQ(pool.AvailableBytes(), 20000 - 4 * 4096) << "of the fullest";
  }
  for (const PageId page : {PageId{-1}, PageId{16}, PageId{1 << 30}}) {
    EXPECT_EQ(pool.References(0, PageKind::kQuantized, page), 0) << page;
  }

  PagePool third(Cpu(), layout, {.budget_bytes = 20000, .borrowed = true, .ranks = 4, .rank = 2});
  for (const PageId page : of_rank[2]) {
    EXPECT_EQ(third.Base(0, PageKind::kQuantized) + page * 4096, third.Record(0, PageKind::kQuantized, page));
    std::memset(third.Record(0, PageKind::kQuantized, page), page, 4096);
  }
  for (const PageId page : of_rank[2]) EXPECT_EQ(*third.Record(0, PageKind::kQuantized, page), page);
  EXPECT_EQ(third.References(0, PageKind::kQuantized, 15), 1);
  EXPECT_EQ(third.References(0, PageKind::kQuantized, 16), 0);

  // A rank's memory moves between its own pools, and rank 0 tells it so.
  for (const PageId page : of_rank[2]) pool.Release(0, PageKind::kQuantized, page);
  EXPECT_EQ(pool.UsedBytes(), 4 * 4096);
  EXPECT_NE(pool.Allocate(0, PageKind::kExact, 2), kNoPage);
  const std::vector<RecordChange> released = pool.TakeChanges();
  EXPECT_EQ(released.size(), 2U);
  for (const auto& [kind, record, coded] : released) {
    EXPECT_EQ(kind, RecordChangeKind::kRelease);
    EXPECT_TRUE(third.IsOfRank(0, record.kind, record.page, 2));
    third.ReleaseMemory(record);
    EXPECT_EQ(*third.Record(0, record.kind, record.page), 0) << "fresh memory";
  }
  const PageId kept = of_rank[2][0] == released[0].record.page || of_rank[2][0] == released[1].record.page
                          ? of_rank[2][3]
                          : of_rank[2][0];
  EXPECT_EQ(*third.Record(0, PageKind::kQuantized, kept), kept);
  third.ReleaseMemory({.group = 0, .kind = PageKind::kQuantized, .page = of_rank[0][0]});  // another rank's
}

// Random operations checked against a model: counts and bytes are exact, records never overlap, contents persist.
TEST(PagePool, AccountsExactlyUnderRandomTraffic) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    const int64_t sizes[2] = {static_cast<int64_t>(random() % 5 + 1) * 1040,
                              static_cast<int64_t>(random() % 5 + 1) * 2064};
    const int64_t budget = sizes[0] + sizes[1] + static_cast<int64_t>(random() % 100000);
    PagePool pool(Cpu(), Layout(sizes[0], sizes[1]), {.budget_bytes = budget, .poison_unused = seed % 2 == 0});
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
        const int64_t free = pool.FreePages(0, kind);
        const PageId page = pool.Allocate(0, kind);
        ASSERT_EQ(page != kNoPage, free > 0);
        if (page != kNoPage) {
          const auto mark = static_cast<uint8_t>(random());
          std::memset(pool.Record(0, kind, page), mark, static_cast<size_t>(pool.RecordBytes(0, kind)));
          held.push_back({kind, page, 1, mark});
        }
      } else if (!held.empty()) {
        const size_t index = random() % held.size();
        Held& it = held[index];
        ASSERT_EQ(pool.References(0, it.kind, it.page), it.references);
        const uint8_t* record = pool.Record(0, it.kind, it.page);
        ASSERT_TRUE(
            std::all_of(record, record + pool.RecordBytes(0, it.kind), [&](uint8_t b) { return b == it.mark; }));
        if (random() % 4 == 0) {
          pool.Retain(0, it.kind, it.page);
          ++it.references;
        } else {
          pool.Release(0, it.kind, it.page);
          if (--it.references == 0) held.erase(held.begin() + static_cast<std::ptrdiff_t>(index));
        }
      }
      int64_t used[2] = {0, 0};
      for (const Held& it : held) ++used[static_cast<int>(it.kind)];
      ASSERT_EQ(pool.UsedPages(0, PageKind::kQuantized), used[0]);
      ASSERT_EQ(pool.UsedPages(0, PageKind::kExact), used[1]);
      ASSERT_EQ(pool.UsedBytes(), used[0] * sizes[0] + used[1] * sizes[1]);
      ASSERT_LE(pool.UsedBytes(), pool.CommittedBytes());
      ASSERT_LE(pool.CommittedBytes(), budget);
    }
  }
}

}  // namespace
}  // namespace kvanta::cache
