// KV events: whoever applies them in order knows the pages of the prefix cache.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <utility>

#include "engine/kv_event_log.h"
#include "engine/requests.h"
#include "error_of.h"

namespace kvanta::engine {
namespace {

// A consumer: pages by group and hash, with their parents and tokens.
struct Index {
  struct Page {
    std::optional<uint64_t> parent;
    std::vector<int32_t> tokens;
    bool operator==(const Page&) const = default;
  };
  std::map<std::pair<int, uint64_t>, Page> pages = {};

  // Each event must change something: a page is stored once, and removed once.
  void Apply(std::span<const KvEvent> events) {
    for (const KvEvent& event : events) {
      const std::pair key(event.group, event.block_hash);
      switch (event.kind) {
        case KvEventKind::kStored:
          EXPECT_TRUE(pages.emplace(key, Page{event.parent_block_hash, event.tokens}).second) << "stored twice";
          break;
        case KvEventKind::kRemoved:
          EXPECT_EQ(pages.erase(key), 1u) << "removed, but not stored";
          break;
        case KvEventKind::kCleared:
          pages.clear();
          break;
      }
    }
  }
  bool operator==(const Index&) const = default;
};

Index IndexOf(std::span<const KvEvent> pages) {
  Index index;
  index.Apply(pages);
  return index;
}

constexpr int kPage = 16;

formats::CacheLayout Layout() {
  formats::CacheLayout layout;
  layout.page_size = kPage;
  layout.groups = {{1024, 2048}, {1024, 0}};
  layout.page_bytes = 2048;
  layout.exact_page_bytes = 2048;
  layout.layers.resize(2);
  layout.layers[0].group = 0;
  layout.layers[0].bytes = 1024;
  layout.layers[1].group = 1;
  layout.layers[1].bytes = 1024;
  return layout;
}

// A prefix cache of two groups, the second with a window, under random operations.
class RandomCache {
 public:
  explicit RandomCache(uint64_t seed) : random_(seed) {}

  void Operate() {
    const uint64_t what = random_() % 100;
    const std::string salt = random_() % 4 == 0 ? "tenant" : "";
    std::vector<int32_t> tokens;
    const auto pages = static_cast<int64_t>(random_() % 6 + 1);
    for (int64_t page = 0; page < pages; ++page) tokens.resize(tokens.size() + kPage, static_cast<int>(random_() % 3));
    cache::PrefixCache& prefix = *manager.prefix;
    if (what < 60) {
      Insert(tokens, salt, static_cast<int64_t>(random_()) % pages);
    } else if (what < 80) {
      cache::PrefixCache::Prefix hit = prefix.Match(tokens, salt, pages);
      for (size_t group = 0; group < hit.records.size(); ++group) {
        for (const cache::PageRef& page : hit.records[group]) Release(static_cast<int>(group), page);
      }
    } else if (what < 98) {
      prefix.EvictOne();
    } else if (what < 99) {
      const int64_t index = pages - 1;
      const auto records = prefix.Peek(tokens, salt, index);
      if (!records.empty()) prefix.DropRecord(tokens, salt, index, 1, records[1].quantized);
    } else if (random_() % 20 == 0) {
      prefix.Clear();
    }
  }

  cache::KvCacheManager manager{Cpu(),
                                Layout(),
                                std::vector<cache::Visibility>{{}, cache::SlidingWindow(2 * kPage)},
                                {.budget_bytes = 64 * 1024},
                                true};

 private:
  void Release(int group, const cache::PageRef& page) {
    if (page.quantized != cache::kNoPage) manager.pool.Release(group, cache::PageKind::kQuantized, page.quantized);
  }
  // All pages up to `index`; some without a record of the second group.
  void Insert(const std::vector<int32_t>& tokens, const std::string& salt, int64_t index) {
    for (int64_t page = index == 0 ? 0 : random_() % 2 == 0 ? index : 0; page <= index; ++page) {
      std::vector<cache::PageRef> records(2);
      for (int group = 0; group < 2; ++group) {
        if (group == 1 && random_() % 4 == 0) continue;
        auto& record = records[static_cast<size_t>(group)].quantized;
        record = manager.pool.Allocate(group, cache::PageKind::kQuantized);
        while (record == cache::kNoPage && manager.prefix->EvictOne()) {
          record = manager.pool.Allocate(group, cache::PageKind::kQuantized);
        }
      }
      const std::vector<cache::PageRef> own = records;
      manager.prefix->Insert(tokens, salt, page, records);
      for (int group = 0; group < 2; ++group) Release(group, own[static_cast<size_t>(group)]);
    }
  }

  std::mt19937_64 random_;
};

TEST(KvEventLog, AConsumerAgreesWithTheCacheAfter100000Operations) {
  RandomCache cache(1);
  KvEventLog log(1 << 20);
  log.Attach(cache.manager, "model");
  std::mt19937_64 random(2);
  Index index;
  size_t events = 0;
  size_t largest = 0;
  for (int i = 0; i < 100'000; ++i) {
    cache.Operate();
    if (random() % 100 != 0) continue;
    const auto taken = log.Take(0);
    ASSERT_TRUE(taken) << "the queue was never full";
    events += taken->size();
    index.Apply(*taken);
    ASSERT_EQ(index, IndexOf(log.Pages())) << "operation " << i;
    largest = std::max(largest, index.pages.size());
  }
  EXPECT_GT(events, 50'000u);
  EXPECT_GT(largest, 30u);
}

TEST(KvEventLog, AFullQueueBeginsAgainWithAllPages) {
  RandomCache cache(3);
  KvEventLog log(40);
  log.Attach(cache.manager, "model");
  std::mt19937_64 random(4);
  Index index;
  int restarts = 0;
  for (int i = 0; i < 20'000; ++i) {
    cache.Operate();
    if (random() % 60 != 0) continue;
    const auto taken = log.Take(0);
    restarts += taken ? 0 : 1;
    const auto events = taken ? *taken : log.Restart();
    EXPECT_LE(taken ? events.size() : 0, 40u);
    index.Apply(events);
    ASSERT_EQ(index, IndexOf(log.Pages())) << "operation " << i;
  }
  EXPECT_GT(restarts, 10);
}

// Two logs, as a disk tier and a log: every listener hears everything.
TEST(KvEventLog, HashesDependOnTokensSaltAndIdentityAlone) {
  std::vector<Index> found;
  for (const char* identity : {"model", "model", "other"}) {
    RandomCache cache(5);
    KvEventLog first(1 << 20);
    KvEventLog second(1 << 20);
    first.Attach(cache.manager, identity);
    second.Attach(cache.manager, identity);
    for (int i = 0; i < 200; ++i) cache.Operate();
    found.push_back(IndexOf(first.Pages()));
    EXPECT_EQ(*first.Take(0), *second.Take(0));
  }
  EXPECT_EQ(found[0], found[1]);
  EXPECT_EQ(found[0].pages.size(), found[2].pages.size());
  for (const auto& [key, page] : found[0].pages) EXPECT_FALSE(found[2].pages.contains(key));
}

// Times that no clock can count.
TEST(KvEventLog, WaitsWithoutEnd) {
  KvEventLog log(8);
  for (int round = 0; round < 20; ++round) {
    for (const double seconds : {std::numeric_limits<double>::infinity(), 1e300, 1e10}) {
      log.Take(0);
      std::jthread later([&] { log.Clear(); });
      EXPECT_EQ(log.Take(seconds)->size(), 1U) << seconds;
    }
  }
  EXPECT_EQ(log.Take(-std::numeric_limits<double>::infinity())->size(), 0U);
}

class EngineKvEvents : public ::testing::Test {
 protected:
  EngineConfig Config() const {
    EngineConfig config = TinyConfig(model_, "int4");
    config.kv_events_queue_size = 1000;
    return config;
  }

  TinyModel model_;
};

TEST_F(EngineKvEvents, RequestsStorePagesAndEvictionRemovesThem) {
  EngineConfig config = Config();
  config.kv_cache_memory_bytes = PlanCacheBytes(config).sequence_bytes * 2;
  Engine engine(config);
  std::mt19937_64 random(6);
  Index index;
  size_t removed = 0;
  for (int i = 0; i < 60; ++i) {
    std::vector<int32_t> prompt(random() % 60 + 20);
    for (int32_t& token : prompt) token = static_cast<int32_t>(random() % 96);
    Request request{.id = std::to_string(i), .prompt = prompt, .sampling = Greedy(4)};
    request.cache_salt = i % 3 == 0 ? "tenant" : "";
    RunOne(engine, std::move(request));
    const auto events = engine.TakeKvEvents();
    if (i == 0) {
      ASSERT_FALSE(events.empty());
      EXPECT_EQ(events[0].kind, KvEventKind::kCleared) << "pages of an earlier process";
      EXPECT_EQ(events[1].tokens, std::vector<int32_t>(prompt.begin(), prompt.begin() + 16));
      EXPECT_EQ(events[1].cache_salt, "tenant");
      EXPECT_EQ(events[1].parent_block_hash, std::nullopt);
    }
    for (const KvEvent& event : events) removed += event.kind == KvEventKind::kRemoved ? 1 : 0;
    index.Apply(events);
    ASSERT_EQ(index, IndexOf(engine.CachedPages()));
    ASSERT_EQ(static_cast<int64_t>(index.pages.size()), engine.Stats().prefix_pages);
  }
  EXPECT_GT(removed, 50u);
  for (const auto& [key, page] : index.pages) {
    EXPECT_TRUE(!page.parent || index.pages.contains({0, *page.parent})) << "a page without the page before it";
  }
  engine.ResetPrefixCache();
  const auto events = engine.TakeKvEvents();
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, KvEventKind::kCleared);
  EXPECT_TRUE(engine.CachedPages().empty());
  EXPECT_NE(ErrorOf([&] { engine.TakeKvEvents(std::nan("")); }).find("timeout_seconds is NaN"), std::string::npos);
}

TEST_F(EngineKvEvents, TheFirstPageIsAnnouncedWhereItIsKeptExact) {
  EngineConfig config = Config();
  config.kv_cache_dtype = "int4+exact=open+sink=1";
  Engine engine(config);
  RunOne(engine, {.id = "a", .prompt = std::vector<int32_t>(40, 7), .sampling = Greedy(1)});
  EXPECT_EQ(engine.CachedPages().size(), 2u);
}

TEST_F(EngineKvEvents, NeedTheOptionAndThePrefixCache) {
  EngineConfig config = Config();
  config.kv_events_queue_size = 0;
  Engine engine(config);
  EXPECT_NE(ErrorOf([&] { engine.TakeKvEvents(); }).find("kv_events_queue_size"), std::string::npos);
  config = Config();
  config.enable_prefix_caching = false;
  EXPECT_NE(ErrorOf([&] { const Engine none(config); }).find("enable_prefix_caching"), std::string::npos);
}

}  // namespace
}  // namespace kvanta::engine
