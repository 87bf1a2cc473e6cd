// Precision by pressure: demoted pages are read from their later level, on every instruction set, and no bit depends on
// steps, batches or threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "attention/cache_harness.h"

namespace kvanta::attention {
namespace {

using cache::PageKind;

const char* const kFloorSchemes[] = {"0=int8,floor=t3+sink=0",
                                     "0=int8,floor=int4,floor=t2",
                                     "0=int4,floor=int2_g32+sink=2",
                                     "0=int4+exact=2,floor=t3",
                                     "0=k=int8+mean+outliers=2,v=int8,floor=k=int5_g32,v=int4+sink=1",
                                     "0=fp8+hadamard,floor=k=int3_g32,v=t2+sink=0",
                                     "0=bf16+hadamard,floor=int8,floor=mxfp4+hadamard+sink=0"};

HarnessOptions OptionsOf(const std::string& scheme, std::vector<int> lengths) {
  return {.scheme = scheme, .heads = 4, .kv_heads = 2, .head_dim = 64, .page_size = 16, .lengths = std::move(lengths)};
}

// Demotes a page of a sequence, if it may be.
void Demote(CacheHarness& harness, Backend& backend, size_t sequence, size_t page, int level) {
  const cache::KvCacheSpec spec(harness.layout());
  cache::PageRef& ref = harness.sequences()[sequence].table[page];
  if (!spec.groups[0].IsDemotable(static_cast<int64_t>(page)) || cache::LevelOf(ref) >= level) return;
  cache::PagePool& pool = harness.store();
  uint8_t* later[std::size(cache::kAgedKinds)] = {};
  for (int each = level; ref.quantized != cache::kNoPage && each <= spec.floors; ++each) {
    const PageKind kind = cache::LevelKind(each);
    ref.Of(kind) = pool.Allocate(0, kind, /*rank=*/0, /*from_reserve=*/true);
    ASSERT_NE(ref.Of(kind), cache::kNoPage);
    later[AgeIndex(kind)] = pool.Record(0, kind, ref.Of(kind));
  }
  if (ref.quantized != cache::kNoPage) {
    backend.EncodeLevels(0, pool.Record(0, PageKind::kQuantized, ref.quantized), later);
  }
  for (int each = 0; each < level; ++each) {
    cache::PageId& record = ref.Of(cache::LevelKind(each));
    if (record != cache::kNoPage) pool.Release(0, cache::LevelKind(each), record);
    record = cache::kNoPage;
  }
}

class FloorTest : public ::testing::TestWithParam<testing::Unit> {};

INSTANTIATE_TEST_SUITE_P(Units, FloorTest, ::testing::ValuesIn(testing::Units()),
                         [](const auto& unit) { return unit.param.name; });

double Rms(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - double{b[i]}, 2);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

// A kernel that read another level than the reference would err as much as the formats differ.
TEST_P(FloorTest, ReadsTheLevelsThatTheReferenceReads) {
  uint32_t seed = 1;
  for (const char* scheme : kFloorSchemes) {
    SCOPED_TRACE(scheme);
    CacheHarness harness(OptionsOf(scheme, {260}), seed++);
    const std::unique_ptr<Backend> reference = MakeReferenceBackend(harness.store(), harness.config());
    const std::unique_ptr<Backend> backend = harness.CpuBackend(*GetParam().table, 2);
    harness.RunStep(*backend, {{0, 100}}, reference.get());
    for (const size_t page : {0, 2, 3}) Demote(harness, *backend, 0, page, 1);
    harness.RunStep(*backend, {{0, 1}}, reference.get());
    Demote(harness, *backend, 0, 3, cache::KvCacheSpec(harness.layout()).floors);
    harness.RunStep(*backend, {{0, 59}}, reference.get());
    for (size_t page = 0; page < 10; ++page) Demote(harness, *backend, 0, page, 1);
    harness.RunStep(*backend, {{0, 100}}, reference.get());
    const CacheHarness::Sequence& sequence = harness.sequences()[0];
    const double size = Rms(sequence.expected, std::vector<float>(sequence.expected.size()));
    EXPECT_LT(Rms(sequence.out, sequence.expected), 0.012 * size);
  }
}

TEST_P(FloorTest, ChunksBatchesAndThreadsGiveTheSameBits) {
  uint32_t seed = 50;
  for (const char* scheme : kFloorSchemes) {
    SCOPED_TRACE(scheme);
    std::mt19937 random(seed);
    const std::vector<int> lengths = {203, 90};
    CacheHarness one(OptionsOf(scheme, lengths), seed), two(OptionsOf(scheme, lengths), seed++);
    const std::unique_ptr<Backend> serial = one.CpuBackend(*GetParam().table);
    const std::unique_ptr<Backend> parallel = two.CpuBackend(*GetParam().table, 4);
    const int floors = cache::KvCacheSpec(one.layout()).floors;
    struct Event {
      size_t sequence, page;
      int level;
    };
    std::multimap<std::pair<size_t, int>, Event> events;  // by sequence and position
    for (int i = 0; i < 12; ++i) {
      const size_t sequence = random() % 2;
      const int position = static_cast<int>(random() % static_cast<uint32_t>(lengths[sequence] - 17)) + 17;
      events.emplace(std::pair(sequence, position), Event{sequence, random() % static_cast<size_t>(position / 16),
                                                          static_cast<int>(random()) % floors == 0 ? 1 : floors});
    }
    const auto apply = [&](CacheHarness& harness, Backend& backend, size_t sequence) {
      const auto start = static_cast<int>(harness.sequences()[sequence].start);
      const auto [first, last] = events.equal_range({sequence, start});
      for (auto at = first; at != last; ++at) Demote(harness, backend, sequence, at->second.page, at->second.level);
    };
    for (size_t i = 0; i < 2; ++i) {
      for (int token = 0; token < lengths[i]; ++token) {
        apply(one, *serial, i);
        one.RunStep(*serial, {{static_cast<int>(i), 1}});
      }
    }
    const auto left = [&](size_t i) { return lengths[i] - static_cast<int>(two.sequences()[i].start); };
    while (left(0) + left(1) > 0) {
      Step step;
      for (size_t i = 0; i < 2; ++i) {
        apply(two, *parallel, i);
        const auto start = static_cast<int>(two.sequences()[i].start);
        int tokens = std::min(left(i), static_cast<int>(random() % 120));
        const auto next = events.upper_bound({i, start});
        if (next != events.end() && next->first.first == i) tokens = std::min(tokens, next->first.second - start);
        if (tokens > 0) step.push_back({static_cast<int>(i), tokens});
      }
      if (!step.empty()) two.RunStep(*parallel, step);
    }
    for (size_t i = 0; i < 2; ++i) {
      const std::vector<float>&a = one.sequences()[i].out, &b = two.sequences()[i].out;
      ASSERT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << "sequence " << i;
      ASSERT_EQ(one.Bytes(static_cast<int>(i)), two.Bytes(static_cast<int>(i))) << "sequence " << i;
    }
  }
}

// Demotion gives the bytes that aging does.
TEST_P(FloorTest, LaterLevelsAreThoseOfAges) {
  for (const auto& [floor, ages] : {std::pair("0=int8,floor=t3+sink=0", "0=int8,16=t3+sink=0"),
                                    std::pair("0=int4,floor=t2+sink=0", "0=int4,16=t2+sink=0")}) {
    CacheHarness demoted(OptionsOf(floor, {64}), 3), aged(OptionsOf(ages, {64}), 3);
    const std::unique_ptr<Backend> a = demoted.CpuBackend(*GetParam().table, 2);
    const std::unique_ptr<Backend> b = aged.CpuBackend(*GetParam().table);
    demoted.Append(*a, {0, 48});
    aged.Append(*b, {0, 48});
    demoted.Append(*a, {0, 1});
    for (size_t page = 0; page < 3; ++page) Demote(demoted, *a, 0, page, 1);
    aged.Append(*b, {0, 1});
    for (size_t page = 1; page < 3; ++page) {  // int4 keeps the first one exact
      const auto bytes = [&](CacheHarness& harness) {
        const cache::PageId id = harness.sequences()[0].table[page].Of(PageKind::kAged);
        const uint8_t* record = harness.store().Record(0, PageKind::kAged, id);
        return std::vector<uint8_t>(record, record + harness.store().RecordBytes(0, PageKind::kAged));
      };
      EXPECT_EQ(bytes(demoted), bytes(aged)) << floor << " page " << page;
    }
  }
}

}  // namespace
}  // namespace kvanta::attention
