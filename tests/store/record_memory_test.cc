// Records in the host's memory: bounded by bytes, the least recently used ones go first, and none before records that
// are of no use without it.
#include "store/record_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "cache/small_pages.h"
#include "failing_new.h"
#include "store/file_system.h"

namespace kvanta::store {
namespace {

using cache::kPageBytes;
using cache::PageKind;
using Outcome = ReadResult::Outcome;

constexpr int64_t kSecondNs = 1'000'000'000;

// Group 0 sees all tokens, and keeps its first page exact; group 1 has a window.
cache::KvCacheSpec TwoGroups() {
  cache::KvCacheSpec spec(cache::SmallPages());
  spec.groups.push_back(spec.groups[0]);
  spec.groups[0].sink_pages = 1;
  spec.groups[1].visibility = {cache::VisibilityKind::kSlidingWindow, 24};
  return spec;
}

PageKey KeyOf(int prefix, int64_t index) {
  return ChildKey(IdentityKey(std::to_string(prefix)), std::vector<int32_t>{static_cast<int32_t>(index)});
}

RecordUse Use(int prefix, int64_t index, int group = 0, PageKind kind = PageKind::kQuantized) {
  return {.id = {KeyOf(prefix, index), group, kind}, .index = index};
}

uint8_t Mark(const RecordUse& use) {
  return static_cast<uint8_t>(use.id.key[0] + 2 * use.id.group + static_cast<int>(use.id.kind));
}

std::vector<int32_t> TokensOf(const RecordUse& use) {
  return {use.id.key[0], use.id.key[1], static_cast<int32_t>(use.index)};
}

class Memory {
 public:
  explicit Memory(int64_t pages) : arena_(HostArena::Make(Cpu(), pages * kPageBytes)) {}

  // Parents are known by prefix, since a key does not give them back.
  bool Put(int prefix, const RecordUse& use, int64_t bytes = kPageBytes) {
    Buffer payload = records_.Allocate(bytes);
    if (!payload) return false;
    std::fill_n(payload.data(), payload.bytes(), Mark(use));
    Write(prefix, use, std::move(payload));
    return true;
  }
  void Write(int prefix, const RecordUse& use, Buffer payload) {
    const auto content = std::make_shared<const RecordContent>(
        RecordContent{.parent = use.index > 0 ? KeyOf(prefix, use.index - 1) : PageKey{},
                      .tokens = TokensOf(use),
                      .payload = std::move(payload)});
    const RecordToWrite record{.use = use, .header = {}, .content = content};
    EXPECT_EQ(records_.Write({&record, 1}).error, "");
  }
  void PutPrefix(int prefix, int64_t pages) {
    for (int64_t page = 0; page < pages; ++page) EXPECT_TRUE(Put(prefix, Use(prefix, page)));
  }
  std::vector<int64_t> Pages(int prefix) const {
    std::vector<int64_t> pages;
    for (int64_t page = 0; page < 16; ++page) {
      if (records_.IsKnown(Use(prefix, page).id)) pages.push_back(page);
    }
    return pages;
  }
  ReadResult Read(const RecordUse& use) { return records_.Read({&use.id, 1})[0]; }
  void Touch(const RecordUse& use) { records_.Touch({&use, 1}); }
  void Pin(const RecordUse& use, int64_t until_ns) { records_.Pin({&use, 1}, {&until_ns, 1}); }
  CacheTierStats Stats() const {
    CacheTierStats stats;
    records_.Describe(stats);
    return stats;
  }
  RecordMemory& operator*() { return records_; }

 private:
  std::shared_ptr<HostArena> arena_;
  RecordMemory records_{arena_, TwoGroups()};
};

testing::AssertionResult IsWhole(const ReadResult& result, const RecordUse& use) {
  if (result.outcome != Outcome::kRead) return testing::AssertionFailure() << "not read";
  if (result.content->tokens != TokensOf(use)) return testing::AssertionFailure() << "other token ids";
  const auto payload = result.content->Payload();
  const bool same = std::ranges::all_of(payload, [&](uint8_t byte) { return byte == Mark(use); });
  return same ? testing::AssertionSuccess() : testing::AssertionFailure() << "other bytes";
}

TEST(RecordMemoryTest, KeepsWhatIsWritten) {
  Memory memory(8);
  const RecordUse first = Use(1, 0), exact = Use(1, 0, 0, PageKind::kExact);
  memory.Put(1, first);
  memory.Put(1, exact, 2 * kPageBytes);
  EXPECT_TRUE(IsWhole(memory.Read(first), first));
  EXPECT_TRUE(IsWhole(memory.Read(exact), exact));
  EXPECT_EQ(memory.Read(Use(2, 0)).outcome, Outcome::kMissing);
  const std::vector<RecordId> ids = {Use(2, 0).id, first.id};
  std::vector<uint8_t> found(2, 0);
  EXPECT_EQ((*memory).Find(ids, found), "");
  EXPECT_EQ(found, (std::vector<uint8_t>{0, 1}));
  EXPECT_EQ(memory.Stats().files, 2);
  EXPECT_EQ(memory.Stats().bytes, 3 * kPageBytes);
  EXPECT_EQ(memory.Stats().limit_bytes, 8 * kPageBytes);
  (*memory).Invalidate(first.id);
  EXPECT_FALSE((*memory).IsKnown(first.id));
  (*memory).Remove({&exact.id, 1});
  EXPECT_EQ(memory.Stats().bytes, 0);
  EXPECT_EQ(memory.Stats().evictions, 0);
}

TEST(RecordMemoryTest, TheLeastRecentlyUsedGoFirst) {
  Memory memory(3);
  for (const int prefix : {1, 2, 3}) memory.Put(prefix, Use(prefix, 0));
  memory.Touch(Use(1, 0));
  memory.Put(4, Use(4, 0));
  EXPECT_EQ(memory.Pages(2), std::vector<int64_t>());
  memory.Put(5, Use(5, 0));
  EXPECT_EQ(memory.Pages(3), std::vector<int64_t>());
  for (const int prefix : {1, 4, 5}) EXPECT_EQ(memory.Pages(prefix), std::vector<int64_t>{0}) << prefix;
  EXPECT_EQ(memory.Stats().evictions, 2);
}

TEST(RecordMemoryTest, WhatALookupFindsIsUsed) {
  Memory memory(4);
  memory.PutPrefix(1, 2);
  memory.PutPrefix(2, 2);
  const std::vector<RecordId> ids = {Use(1, 0).id, Use(1, 1).id};
  std::vector<uint8_t> found(2, 0);
  EXPECT_EQ((*memory).Find(ids, found), "");
  memory.PutPrefix(3, 2);
  EXPECT_EQ(memory.Pages(1).size(), 2u);
  EXPECT_EQ(memory.Pages(2), std::vector<int64_t>());
}

// First pages are written first. Without them, those after them are useless.
TEST(RecordMemoryTest, NoPageGoesBeforeThoseBehindIt) {
  Memory memory(8);
  memory.PutPrefix(1, 4);
  memory.PutPrefix(2, 4);
  memory.PutPrefix(3, 2);
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(memory.Pages(2).size(), 4u) << "one prefix loses its pages after the other";
  memory.Touch(Use(1, 0));  // a hit on its first page alone
  memory.Put(4, Use(4, 0));
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>{0});
  memory.PutPrefix(5, 4);
  EXPECT_EQ(memory.Pages(2), std::vector<int64_t>());
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>{0});
}

// Two prefixes that share their first two pages.
TEST(RecordMemoryTest, ASharedPageStaysUntilItsLastContinuationGoes) {
  Memory memory(4);
  memory.PutPrefix(1, 3);
  const RecordUse branch = {.id = {KeyOf(2, 2), 0, PageKind::kQuantized}, .index = 2};
  memory.Put(1, branch);  // after page 1 of prefix 1
  memory.Put(3, Use(3, 0));
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1}));
  memory.Put(4, Use(4, 0));
  EXPECT_FALSE((*memory).IsKnown(branch.id));
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1}));
  memory.Put(5, Use(5, 0));
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>{0});
}

// Records outside a window, and exact copies that only a hit which ends there reads, go by their use alone; an exact
// first page is read by every hit.
TEST(RecordMemoryTest, RecordsThatFewHitsReadGoByTheirUse) {
  Memory memory(12);
  memory.Put(1, Use(1, 0, 0, PageKind::kExact), 2 * kPageBytes);
  for (int64_t page = 0; page < 3; ++page) {
    memory.Put(1, Use(1, page));
    memory.Put(1, Use(1, page, 1));
  }
  memory.Put(1, Use(1, 1, 0, PageKind::kExact), 2 * kPageBytes);
  memory.Touch(Use(1, 1, 1));
  for (int64_t page = 0; page < 3; ++page) memory.Touch(Use(1, page));
  memory.PutPrefix(2, 6);
  EXPECT_FALSE((*memory).IsKnown(Use(1, 0, 1).id));
  EXPECT_FALSE((*memory).IsKnown(Use(1, 2, 1).id));
  EXPECT_FALSE((*memory).IsKnown(Use(1, 1, 0, PageKind::kExact).id));
  EXPECT_TRUE((*memory).IsKnown(Use(1, 1, 1).id)) << "used since";
  EXPECT_TRUE((*memory).IsKnown(Use(1, 0, 0, PageKind::kExact).id));
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1, 2}));
}

TEST(RecordMemoryTest, WhatIsReadIsNeitherEvictedNorOverwritten) {
  Memory memory(4);
  for (int prefix = 0; prefix < 4; ++prefix) memory.Put(prefix, Use(prefix, 0));
  std::vector<ReadResult> held;
  for (int prefix = 0; prefix < 3; ++prefix) held.push_back(memory.Read(Use(prefix, 0)));
  for (int prefix = 10; prefix < 20; ++prefix) EXPECT_TRUE(memory.Put(prefix, Use(prefix, 0)));
  for (int prefix = 0; prefix < 3; ++prefix) {
    EXPECT_TRUE(IsWhole(held[static_cast<size_t>(prefix)], Use(prefix, 0)));
    EXPECT_TRUE(IsWhole(memory.Read(Use(prefix, 0)), Use(prefix, 0)));
  }
  held.push_back(memory.Read(Use(19, 0)));
  EXPECT_FALSE(memory.Put(20, Use(20, 0))) << "all is being read";
  held.clear();
  EXPECT_TRUE(memory.Put(20, Use(20, 0)));
}

TEST(RecordMemoryTest, PinnedRecordsStayInTheirHalf) {
  Memory memory(8);
  const int64_t later = WallClockNs() + 1000 * kSecondNs;
  memory.PutPrefix(1, 6);
  for (int64_t page = 0; page < 6; ++page) memory.Pin(Use(1, page), later);
  memory.PutPrefix(2, 6);
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1, 2, 3})) << "half of the memory, from the first page on";
  memory.Pin(Use(1, 3), later + kSecondNs);
  memory.Pin(Use(1, 3), later);
  for (int prefix = 10; prefix < 20; ++prefix) memory.Put(prefix, Use(prefix, 0));
  EXPECT_EQ(memory.Pages(1).size(), 4u);
}

TEST(RecordMemoryTest, PinsEndWithTheirTime) {
  Memory memory(4);
  memory.PutPrefix(1, 2);
  for (int64_t page = 0; page < 2; ++page) memory.Pin(Use(1, page), 1);  // in 1970
  memory.PutPrefix(2, 4);
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>());
}

// Without anything else, those that are kept for the shortest time go.
TEST(RecordMemoryTest, PinnedRecordsGoBeforeNewOnesAreRefused) {
  Memory memory(2);
  const int64_t now = WallClockNs();
  memory.Put(1, Use(1, 0));
  memory.Pin(Use(1, 0), now + 1000 * kSecondNs);
  EXPECT_TRUE(memory.Put(2, Use(2, 0), 2 * kPageBytes));
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>());
}

TEST(RecordMemoryTest, PayloadsFromElsewhereAreNotKept) {
  Memory memory(2);
  memory.Write(1, Use(1, 0), OwnBytes(std::vector<uint8_t>(kPageBytes)));
  EXPECT_FALSE((*memory).IsKnown(Use(1, 0).id));
  EXPECT_EQ(memory.Stats().dropped_records, 1);
}

// A page that was removed and comes again finds those after it.
TEST(RecordMemoryTest, ARemovedPageMayComeAgain) {
  Memory memory(4);
  memory.PutPrefix(1, 3);
  (*memory).Invalidate(Use(1, 1).id);
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 2}));
  memory.Put(1, Use(1, 1));
  memory.Touch(Use(1, 2));
  memory.Put(2, Use(2, 0));
  memory.Put(3, Use(3, 0));
  EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1})) << "the last page first";
  for (int prefix = 10; prefix < 14; ++prefix) memory.Put(prefix, Use(prefix, 0));
  EXPECT_EQ(memory.Pages(1), std::vector<int64_t>());
}

// Every operation at random: bytes within the limit, records whole, and in the end all memory is there again.
TEST(RecordMemoryTest, RandomOperations) {
  constexpr int kPrefixes = 8;
  Memory memory(12);
  std::mt19937_64 random(4);
  const auto any = [&] {
    const auto index = static_cast<int64_t>(random() % 6);
    return std::pair(static_cast<int>(random() % kPrefixes), index);
  };
  const auto kind = [&] { return random() % 4 == 0 ? PageKind::kExact : PageKind::kQuantized; };
  for (int i = 0; i < 20'000; ++i) {
    const auto [prefix, index] = any();
    const RecordUse use = Use(prefix, index, static_cast<int>(random() % 2), kind());
    switch (random() % 8) {
      case 0:
        memory.Touch(use);
        break;
      case 1:
        (*memory).Invalidate(use.id);
        break;
      case 2:
        memory.Pin(use, WallClockNs() + static_cast<int64_t>(random() % 3) * kSecondNs / 1000);
        break;
      case 3:
        if ((*memory).IsKnown(use.id)) {
          ASSERT_TRUE(IsWhole(memory.Read(use), use));
        }
        break;
      default:
        ASSERT_TRUE(memory.Put(prefix, use, use.id.kind == PageKind::kExact ? 2 * kPageBytes : kPageBytes));
    }
    ASSERT_LE(memory.Stats().bytes, 12 * kPageBytes);
  }
  EXPECT_GT(memory.Stats().evictions, 1000);
  EXPECT_TRUE(memory.Put(99, Use(99, 0), 12 * kPageBytes)) << "everything else can go";
  EXPECT_EQ(memory.Stats().files, 1);
}

// Whichever allocation fails, the record is there or not, and all records can go.
TEST(RecordMemoryTest, AWriteWithoutMemoryChangesNothing) {
  for (int64_t nth = 0;; ++nth) {
    Memory memory(8);
    memory.PutPrefix(1, 3);
    const auto content = std::make_shared<const RecordContent>(
        RecordContent{.parent = KeyOf(1, 2), .tokens = TokensOf(Use(1, 3)), .payload = (*memory).Allocate(kPageBytes)});
    const RecordToWrite record{.use = Use(1, 3), .header = {}, .content = content};
    allocations_left = nth;
    failures_left = 1;
    bool failed = false;
    try {
      EXPECT_EQ((*memory).Write({&record, 1}).error, "");
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    allocations_left = -1;
    EXPECT_EQ(memory.Pages(1).size(), failed ? 3u : 4u) << nth;
    (*memory).Invalidate(Use(1, 3).id);
    memory.Put(1, Use(1, 3));
    EXPECT_EQ(memory.Pages(1), (std::vector<int64_t>{0, 1, 2, 3})) << nth;
    for (int prefix = 10; prefix < 18; ++prefix) EXPECT_TRUE(memory.Put(prefix, Use(prefix, 0))) << nth;
    EXPECT_EQ(memory.Pages(1), std::vector<int64_t>()) << nth;
    if (!failed) return;
  }
}

// A removal frees memory, and must not need any.
TEST(RecordMemoryTest, RemovalNeedsNoMemory) {
  Memory memory(8);
  memory.PutPrefix(1, 3);
  const std::array ids = {Use(1, 1).id, Use(1, 2).id, Use(1, 0).id};
  allocations_left = 0;
  failures_left = -1;  // all
  (*memory).Remove(ids);
  allocations_left = -1;
  EXPECT_EQ(memory.Stats().bytes, 0);
}

// Threads that write, read, touch and remove.
TEST(RecordMemoryTest, ThreadsSeeWholeRecords) {
  Memory memory(16);
  std::atomic<int> reads = 0, faults = 0;
  std::atomic<bool> stop = false;
  std::vector<std::jthread> threads;
  for (uint64_t seed = 0; seed < 2; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      while (!stop) {
        const int prefix = static_cast<int>(random() % 12);
        const RecordUse use = Use(prefix, static_cast<int64_t>(random() % 4));
        const ReadResult result = memory.Read(use);
        if (result.outcome == Outcome::kRead) {
          ++reads;
          faults += IsWhole(result, use) ? 0 : 1;
          memory.Touch(use);
        }
        if (random() % 16 == 0) (*memory).Invalidate(use.id);
      }
    });
  }
  std::mt19937_64 random(9);
  for (int i = 0; i < 20'000 || reads < 1000; ++i) {
    const int prefix = static_cast<int>(random() % 12);
    memory.Put(prefix, Use(prefix, static_cast<int64_t>(random() % 4)));
  }
  stop = true;
  threads.clear();
  EXPECT_EQ(faults, 0);
  EXPECT_LE(memory.Stats().bytes, 16 * kPageBytes);
}

}  // namespace
}  // namespace kvanta::store
