// The queue of writes to a place that hangs or is slow: bounded in memory and, when the process ends, in time.
#include "store/record_writer.h"

#include <gtest/gtest.h>

#include <atomic>

#include "base/clock.h"
#include "store/fake_redis.h"
#include "store/redis_server.h"

namespace kvanta::store {
namespace {

RecordId Id(int number) {
  return {IdentityKey(std::to_string(number)), 0};
}

std::shared_ptr<const RecordContent> Content() {
  return std::make_shared<const RecordContent>(
      RecordContent{.tokens = {1}, .payload = OwnBytes(std::vector<uint8_t>(100))});
}

// Hangs in Open() until it is told not to.
class HangingPlace final : public RecordBackend {
 public:
  std::string Name() const override { return "place"; }
  std::string NameOf(const RecordId& /*id*/) const override { return "record"; }
  int64_t BatchBytes() const noexcept override { return 1000; }
  bool IsKnown(const RecordId& /*id*/) const override { return false; }
  bool NeedsTouch(const RecordId& /*id*/) const override { return true; }
  void Invalidate(const RecordId& /*id*/) override {}
  void Describe(CacheTierStats& /*stats*/) const override {}
  void Open() override {
    while (hangs) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  WriteResult Write(std::span<const RecordToWrite> /*records*/) override { return {}; }
  void Touch(std::span<const RecordUse> records) override { touches += std::ssize(records); }
  void Pin(std::span<const RecordUse> records, std::span<const int64_t> /*until_ns*/) override {
    pins += std::ssize(records);
  }
  void Remove(std::span<const RecordId> ids) override { removals += std::ssize(ids); }
  std::string Find(std::span<const RecordId> /*ids*/, std::span<uint8_t> /*found*/) override { return {}; }
  std::vector<ReadResult> Read(std::span<const RecordId> ids) override { return std::vector<ReadResult>(ids.size()); }

  std::atomic<bool> hangs = true;
  std::atomic<int64_t> touches = 0, pins = 0, removals = 0;
};

struct Place {
  HangingPlace backend;
  RecordWriter writer{backend, IdentityKey("model"), {}};
};

TEST(RecordWriterTest, JobsOfAHangingPlaceAreBounded) {
  const auto place = std::make_shared<Place>();
  place->writer.Start(place);
  constexpr int kJobs = 30'000;
  for (int i = 0; i < kJobs; ++i) {
    place->writer.Touch({.id = Id(i)});
    place->writer.Pin({.id = Id(i)}, 1);
    place->writer.Drop(Id(i));
  }
  EXPECT_TRUE(place->writer.ShouldWrite(Id(0), 100)) << "bounded by bytes";
  place->writer.Write({.id = Id(0)}, Content());
  place->backend.hangs = false;
  place->writer.Flush();
  const int64_t performed = place->backend.touches + place->backend.pins + place->backend.removals;
  EXPECT_GT(performed, 50'000);
  EXPECT_LT(performed, 70'000);
  EXPECT_LT(place->backend.removals, kJobs);
  place->writer.RequestStop(Now() + 10);
  place->writer.End();
}

TEST(RecordWriterTest, AHangingPlaceIsLeftBehind) {
  auto place = std::make_shared<Place>();
  const std::weak_ptr<Place> alive = place;
  place->writer.Start(place);
  for (int i = 0; i < 9; ++i) place->writer.Write({.id = Id(i)}, Content());
  place->writer.RequestStop(Now() + 0.1);
  place->writer.End();  // would wait for ever
  HangingPlace& backend = place->backend;
  place.reset();
  EXPECT_FALSE(alive.expired()) << "the thread shares it";
  backend.hangs = false;
  while (!alive.expired()) std::this_thread::yield();
}

struct Served {
  explicit Served(const std::string& url)
      : backend(MakeRedisServer({.url = url, .identity = IdentityKey("model"), .max_record_bytes = 1000})) {}
  std::unique_ptr<RecordBackend> backend;
  RecordWriter writer{*backend, IdentityKey("model"), {}};
};

// Two processes write the same records, of which the server has them once.
TEST(RecordWriterTest, BytesThatAreThereAreNotCounted) {
  FakeRedis fake;
  for (const int64_t bytes : {900, 0}) {
    const auto served = std::make_shared<Served>(fake.Url());
    served->writer.Start(served);
    for (int i = 0; i < 9; ++i) served->writer.Write({.id = Id(i)}, Content());
    served->writer.Flush();
    CacheTierStats stats;
    served->writer.Count(stats);
    EXPECT_EQ(stats.written_bytes, bytes);
    served->writer.RequestStop(Now() + 10);
    served->writer.End();
  }
  EXPECT_EQ(fake.Values().size(), 9u);
}

// A server that takes 50 ms for a record never hangs, but 300 of them would take 15 s.
TEST(RecordWriterTest, ASlowServerIsLeftInTime) {
  FakeRedis fake;
  fake.SetAnswer([](const FakeRedis::Words& words) {
    if (words[0] == "SET") std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return std::optional<std::string>();
  });
  auto served = std::make_shared<Served>(fake.Url());
  const std::weak_ptr<Served> alive = served;
  served->writer.Start(served);
  for (int i = 0; i < 300; ++i) served->writer.Write({.id = Id(i)}, Content());
  while (fake.Values().empty()) std::this_thread::yield();
  served->writer.RequestStop(Now() + 1.5);
  served->backend->EndCalls(0.2);
  served->writer.End();
  served.reset();
  EXPECT_TRUE(alive.expired()) << "its thread has ended";
  EXPECT_LT(fake.Values().size(), 100u);
}

}  // namespace
}  // namespace kvanta::store
